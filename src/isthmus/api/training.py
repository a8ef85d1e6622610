"""`isthmus.train`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Unpack

import msgspec

from isthmus.api.folder import GIVEN
from isthmus.api.given import Given, Objects, check_arguments, kept_folder
from isthmus.api.job_overrides import any_job_of
from isthmus.api.notebook import default_observer, warned
from isthmus.api.observer import Observer
from isthmus.api.run import Run
from isthmus.api.run_job import run_job
from isthmus.api.run_session import ATTACHED, Choices, attached_to, given_callbacks
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.plans import Plan, save_plan
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
