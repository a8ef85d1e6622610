"""`isthmus.train` and `isthmus.federate`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import msgspec
import numpy as np
from torch import Tensor, nn

from isthmus.api.folder import GIVEN
from isthmus.api.given import (
    TARGET,
    Arrays,
    Given,
    Objects,
    Samples,
    check_arguments,
    columns_of,
    inputs_of,
    kept_folder,
    module_of,
    write_arrays,
)
from isthmus.api.job_overrides import any_job_of, federated_job_of
from isthmus.api.notebook import default_observer, warned
from isthmus.api.observer import Observer
from isthmus.api.run import Run
from isthmus.api.run_job import run_job
from isthmus.api.run_session import ATTACHED, Attached, Choices, attached_to, given_callbacks
from isthmus.data import DataSpec
from isthmus.data.partition import PartitionSpec
from isthmus.errors import UserError
from isthmus.federated.algorithms.algorithm import Algorithm
from isthmus.federated.algorithms.registry import give_algorithm
from isthmus.federated.job import FederatedConfig, FederatedJob
from isthmus.job import Job
from isthmus.models import ModelSpec
from isthmus.models.registry import WithLoss, give_model
from isthmus.plans import Plan, save_plan
from isthmus.run_files import CLIENT_NAMES, write_json
from isthmus.runtime.processes.signals import Stop


def train(
    job: Job | FederatedJob | str | Path | None = None,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    plan: Plan | str | Path | None = None,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    dashboard: bool = False,
    **given: Unpack[Given],
) -> Run:
    """Plan, train over one process per device, and compare what was predicted with what was measured; or train the
    clients of a federated job.

    `job` is a job file, a `Job` or a `FederatedJob`; without one the run is of Python objects: `model` and `data`, with
    `loss`, `fleet`, `optimizer`, `steps`, `batch` and `name` where they are not as by default (`Given` says what each
    may be). The data are read once and written as arrays into the run's folder, where devices open them: so the run can
    be resumed. Weights begin as the model has them.

    With `resume` the newest run of this name goes on from its newest checkpoint, or the one in the folder `run`;
    `run` alone names an empty folder. `plan` is followed in place of planning. `overrides` stand in place of what the
    job says: {"training.precision": "bf16"}. `stop.request()`, from any thread, ends the run with a checkpoint; so
    does Ctrl-C, and the outcome is `interrupted`. `callbacks` are objects of classes derived from `isthmus.Callback`,
    called besides those of the job. `track` names trackers in place of the job's: ["tensorboard", "wandb"]. The plan,
    progress, warnings and results are printed on standard error, as the command prints them; in a notebook they are a
    table that is kept up to date. `quiet` or an `observer` of your own is without them. With `dashboard` a page in a
    browser shows the run, and its address is noted.

    Raises UserError for what is wrong with the job, the model or the data, FleetTooSmall where no plan fits, PeerError
    where devices were lost and the run could not go on, Diverged where numbers are not finite, and Interrupted where it
    was to stop before it had begun.

    >>> run = isthmus.train(model=model, loss=loss, data=data, steps=4, batch=4, name="doctest", run=folder)
    >>> run.outcome, len(run.losses)
    ('done', 4)
    """
    observer, stop = observer or default_observer(quiet=given.get("quiet", False)), stop or Stop()
    where = None if run is None else Path(run)
    check_arguments(train, Given, given)
    with warned(quiet=given.get("quiet", False)), contextlib.ExitStack() as files:
        choices = Choices(
            resume=resume,
            run=where,
            plan=files.enter_context(_document(plan)),
            callbacks=given_callbacks(given),
            dashboard=dashboard,
        )
        if job is not None:
            if objects := [name for name in given if name not in ATTACHED]:
                raise UserError(f"train: got a job and {', '.join(objects)}, expected one or the other: see overrides")
            return run_job(attached_to(any_job_of(job, overrides), given), choices, observer, stop)
        objects = Objects(given)
        folder = files.enter_context(kept_folder(objects.name, where, overrides, observer.note, resume=resume))
        made = attached_to(objects.job(folder.path / GIVEN, overrides), given)
        return run_job(made, msgspec.structs.replace(choices, run=folder.path), observer, stop)


@contextlib.contextmanager
def _document(plan: Plan | str | Path | None) -> Generator[Path | None]:
    if not isinstance(plan, Plan):
        yield None if plan is None else Path(plan)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        yield path


CLIENT = "client"  # column that says whose a sample is


class GivenClients(Attached, total=False):
    """Arguments of a federated run in place of a job. `model` and `clients` are needed."""

    model: nn.Module | Callable[[], nn.Module]
    """Its forward takes the data's columns and returns a scalar loss, unless there is a `loss`."""
    clients: Sequence[Samples] | Mapping[str, Samples]
    """Each client's data: columns, a map-style data set or a callable, as `isthmus.train` takes them."""
    loss: Callable[..., Tensor]
    """Called as loss(model(*inputs), target) on samples of several parts, of which the last is the target."""
    test: Samples
    """Samples on which the server's model is evaluated; without them there is no evaluation on held-out samples.
    Every sample of every client trains in any case."""
    algorithm: Algorithm | str  # An `Algorithm` of your own, or a name of `isthmus algorithms`; by default `fedavg`.
    rounds: int  # Rounds to train; by default 10.
    name: str  # The run's name: its folder is runs/NAME.


def federate(
    job: FederatedJob | str | Path | None = None,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    dashboard: bool = False,
    **given: Unpack[GivenClients],
) -> Run:
    """Train one model on many clients' data, which executors of this machine simulate.

    `job` is a federated job file or a `FederatedJob`; without one the run is of Python objects: `model` and `clients`,
    with `algorithm`, `loss`, `test`, `rounds` and `name` where they are not as by default (`GivenClients` says what
    each may be). Clients' data are read once and written as arrays into the run's folder, so that it can be resumed.
    Executors are forked from the caller, or with overrides={"runtime.executors": 1} are the caller itself.
    `callbacks`, `track` and `quiet` are as of `isthmus.train`: without the last, progress goes to standard error.
    `overrides` stand in place of what the job says: {"training.batch_size": 32, "federated.rounds": 5}.
    With `dashboard` a page in a browser shows the rounds, and its address is noted.

    Raises UserError for what is wrong with the job, the model or the data, Diverged where no client's numbers are
    finite, PeerError where no executor is left, and Interrupted where it was to stop before it had begun.

    >>> clients = [{"input": torch.randn(8, 4), "target": torch.zeros(8, 1)} for _ in range(3)]
    >>> overrides = {"runtime.executors": 1}
    >>> result = isthmus.federate(
    ...     model=torch.nn.Linear(4, 1), loss=loss, clients=clients, rounds=2, overrides=overrides, run=federated_folder
    ... )
    >>> result.outcome, len(result.rounds)
    ('done', 2)
    """
    observer, stop = observer or default_observer(quiet=given.get("quiet", False)), stop or Stop()
    where = None if run is None else Path(run)
    check_arguments(federate, GivenClients, given)
    with warned(quiet=given.get("quiet", False)):
        callbacks = given_callbacks(given)
        if job is not None:
            if objects := [name for name in given if name not in ATTACHED]:
                raise UserError(
                    f"federate: got a job and {', '.join(objects)}, expected one or the other: see overrides"
                )
            choices = Choices(resume=resume, run=where, callbacks=callbacks, dashboard=dashboard)
            return run_job(attached_to(federated_job_of(job, overrides), given), choices, observer, stop)
        model, clients = given.get("model"), given.get("clients")
        if model is None or clients is None:
            missing = [name for name in ("model", "clients") if given.get(name) is None]
            raise UserError(f"{', '.join(missing)}: missing, expected a job, or a model and clients")
        built = module_of(model)
        name = given.get("name") or type(built).__name__.lower()
        with kept_folder(name, where, overrides, observer.note, resume=resume) as folder:
            made = _job(built, model, clients, given, folder.path / GIVEN)
            made = federated_job_of(msgspec.structs.replace(made, name=name), overrides)
            choices = Choices(resume=resume, run=folder.path, callbacks=callbacks, dashboard=dashboard)
            return run_job(attached_to(made, given), choices, observer, stop)


def _job(
    built: nn.Module,
    model: nn.Module | Callable[[], nn.Module],
    clients: Sequence[Samples] | Mapping[str, Samples],
    given: GivenClients,
    folder: Path,
) -> FederatedJob:
    loss, algorithm = given.get("loss"), given.get("algorithm", "fedavg")
    named = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    if isinstance(clients, Mapping) and all(hasattr(data, "dtype") for data in clients.values()):
        raise UserError(f"clients: got columns {', '.join(map(str, clients))}, expected the data of each client")
    found: list[Arrays] = []
    for client, data in named:
        try:
            found.append(columns_of(data, built, "train", targets=loss is not None))
        except UserError as e:
            raise UserError(f"clients: {client}: {e}") from None
        if found[-1].keys() != found[0].keys():
            raise UserError(f"clients: {client}: has columns {', '.join(found[-1])}, expected {', '.join(found[0])}")
    if not found:
        raise UserError("clients: got none, expected at least one")
    write_arrays(_joined_clients(found), folder / "clients.npz")
    if isinstance(clients, Mapping):
        write_json(folder.parent / CLIENT_NAMES, list(map(str, clients)))
    options: dict[str, object] = {"path": str((folder / "clients.npz").absolute()), "holdout": 0.0}
    heldout = ""
    if (test := given.get("test")) is not None:
        held = columns_of(test, built, "heldout", targets=loss is not None)
        write_arrays(held, folder / "test.npz")
        heldout = str((folder / "test.npz").absolute())
    source = model if loss is None else WithLoss(built, loss, inputs_of(found[0]), TARGET)
    name = algorithm if isinstance(algorithm, str) else give_algorithm(_checked_algorithm(algorithm))
    return FederatedJob(
        name="federated",
        model=ModelSpec(name=give_model(source)),
        data=DataSpec(kind="npz", options=options, heldout=heldout),
        federated=FederatedConfig(
            algorithm=name,
            rounds=given.get("rounds", 10),
            partition=PartitionSpec(scheme="natural", column=CLIENT),
        ),
    )


def _checked_algorithm(algorithm: object) -> Algorithm:
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm: got {algorithm!r:.80}, expected a name or an isthmus.federated.Algorithm instance")
    return algorithm


def _joined_clients(clients: Sequence[Arrays]) -> Arrays:
    """One client's samples after another's, with a column that says whose each is."""
    sizes = [len(next(iter(columns.values()))) for columns in clients]
    whole: Arrays = {}
    for name in clients[0]:
        parts = [columns[name] for columns in clients]
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(part.shape[1:]) for part in parts[:4])
            raise UserError(f"clients: column {name!r} differs in shape: {shapes}")
        whole[name] = np.concatenate(parts)
    return {**whole, CLIENT: np.repeat(np.arange(len(clients), dtype=np.int64), sizes)}
