"""A job of Python objects: a module, a data set, a fleet and an optimizer in place of what a job file names."""

from __future__ import annotations

import contextlib
import inspect
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import msgspec
from torch import Tensor, nn

from isthmus.api.callbacks import Attached
from isthmus.api.folder import GIVEN, RunFolder
from isthmus.api.optimizers import Optimizer, read_optimizer
from isthmus.api.samples import Arrays, Samples, input_names, read_arrays, write_arrays
from isthmus.api.stored_run import chosen_folder, store_in
from isthmus.data import DataSpec
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import takes
from isthmus.fleet import Fleet, dump_fleet
from isthmus.job import Job, TrainingConfig, checked
from isthmus.models import ModelSpec
from isthmus.models.registry import GIVEN as GIVEN_MODEL
from isthmus.models.registry import WithLoss, give_model
from isthmus.overrides import overridden_struct
from isthmus.run_files import CLIENT_NAMES

TARGET = "target"  # column of what a loss is given beside the model's output
DEFAULT_STEPS, DEFAULT_BATCH = 100, 32
EVALUATIONS = 10  # evaluations of a run with `test`


class Given(Attached, total=False):
    """Arguments of a run in place of a job. `model` and `data` are needed."""

    model: nn.Module | Callable[[], nn.Module]
    """Its forward takes the data's columns and returns a scalar loss, unless there is a `loss`."""
    data: Samples
    """A mapping of columns, a map-style data set, or a callable that returns one of these. Every sample trains; a
    callable that takes `split` is asked for "train" and for "heldout", which evaluations use."""
    test: Samples
    """Held-out samples, which metrics and the held-out loss are of: evaluated ten times in the run, unless `overrides`
    say `training.eval_every`."""
    loss: Callable[..., Tensor]
    """Called as loss(model(*inputs), target) on samples of several parts, of which the last is the target."""
    fleet: Fleet | str | Path  # The fleet; by default the built-in `laptop`.
    optimizer: Optimizer
    """An optimizer of torch: an instance, a class or a `functools.partial` of one; by default AdamW with lr 1e-3."""
    steps: int  # Optimizer steps; by default 100.
    batch: int  # Samples per step; by default 32, or all that there are.
    name: str  # The run's name: its folder is runs/NAME.


def check_arguments(call: Callable[..., object], kind: type, given: Mapping[str, object]) -> None:
    """UserError for a keyword argument that is neither in the typed dict `kind` nor named by `call`."""
    named = [name for name in inspect.signature(call).parameters if name != "given"]
    for key in given:
        if key not in kind.__annotations__:
            raise unknown_name(f"{call.__name__} argument", key, [*kind.__annotations__, *named])


def arguments_needed(call: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # some built-in callables have none
        return []
    flexible = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in flexible]


def module_of(model: object) -> nn.Module:
    """The module, or the one that the callable returns. UserError for anything else."""
    built = model
    if callable(model) and not isinstance(model, nn.Module):
        if needed := arguments_needed(model):
            name = getattr(model, "__name__", type(model).__name__)
            raise UserError(
                f"model: {name} needs {', '.join(needed)}, expected an nn.Module or a call without arguments"
            )
        built = model()
    if not isinstance(built, nn.Module):
        raise UserError(f"model: got {built!r:.80}, expected an nn.Module or a callable that returns one")
    return built


class Objects:
    """The arguments of a run, read and checked."""

    def __init__(self, given: Given) -> None:
        model, data, loss = given.get("model"), given.get("data"), given.get("loss")
        if model is None or data is None:
            missing = [name for name, value in (("model", model), ("data", data)) if value is None]
            raise UserError(f"{', '.join(missing)}: missing, expected a job, or a model and its data")
        if loss is not None and not callable(loss):
            raise UserError(f"loss: got {loss!r:.80}, expected a callable as torch.nn.functional.cross_entropy")
        self._given = given
        built = module_of(model)
        self.train = columns_of(data, built, "train", targets=loss is not None)
        test = given.get("test", data if _has_split(data) else None)
        self.heldout = None if test is None else columns_of(test, built, "heldout", targets=loss is not None)
        self.name = given.get("name") or type(built).__name__.lower()
        self._source = model
        if loss is not None:
            self._source = built = WithLoss(built, loss, inputs_of(self.train), TARGET)
        self.model = built

    def job(self, folder: Path, overrides: Mapping[str, object]) -> Job:
        """A job whose data and fleet are files of this folder, which are written if they are not there."""
        given, most = self._given, len(next(iter(self.train.values())))
        batch = given.get("batch", min(DEFAULT_BATCH, max(1, most)))
        if batch_size(batch) > most:
            raise UserError(f"batch: got {batch}, expected at most {most}: `data` have no more training samples")
        train, heldout = folder / "train.npz", folder / "heldout.npz"
        for path, arrays in ((train, self.train), (heldout, self.heldout)):
            if arrays is not None and not path.is_file():
                write_arrays(arrays, path)
        options: dict[str, object] = {"path": str(train.absolute()), "holdout": 0.0}  # all that is given trains
        data = DataSpec(kind="npz", options=options, heldout=str(heldout.absolute()) if heldout.is_file() else "")
        training = TrainingConfig(steps=given.get("steps", DEFAULT_STEPS), batch_size=batch_size(batch))
        if given.get("test") is not None and self.heldout is not None:
            samples, every = len(next(iter(self.heldout.values()))), max(1, training.steps // EVALUATIONS)
            training = msgspec.structs.replace(training, eval_every=every, eval_samples=samples)
        job = Job(
            name=self.name,
            model=ModelSpec(name=give_model(self._source)),
            data=data,
            fleet=fleet_name(given.get("fleet", "laptop"), folder),
            training=training,
        )
        if (optimizer := given.get("optimizer")) is not None:
            job = msgspec.structs.replace(job, optimizer=read_optimizer(optimizer, self.model))
        made = checked(overridden_struct(job, overrides, "job"))
        if made.evaluates and self.heldout is None and not made.data.options.get("holdout"):
            raise UserError(
                f"training.eval_every: got {made.training.eval_every}, but all of the data train: give held-out "
                "samples as test=..., or override data.options.holdout with a share"
            )
        return made


def batch_size(batch: int) -> int:
    """UserError below 1."""
    if batch < 1:
        raise UserError(f"batch: got {batch}, expected at least 1")
    return batch


def fleet_name(fleet: Fleet | str | Path, folder: Path) -> str:
    """Return the fleet as a job names it; a struct is written to the folder."""
    if isinstance(fleet, str | Path):
        return str(fleet)
    if not isinstance(fleet, Fleet):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"fleet: got {fleet!r:.80}, expected a Fleet, a built-in fleet's name or a path")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fleet.toml"
    path.write_text(dump_fleet(fleet), encoding="utf-8")
    return str(path.absolute())


def is_given(job: Job) -> bool:
    """Return whether the job's model is a Python object of its caller."""
    return job.model.name.startswith(GIVEN_MODEL)


def _has_split(data: Samples) -> bool:
    return callable(data) and not hasattr(data, "__getitem__") and takes(data, "split")


def columns_of(data: Samples, model: nn.Module, split: str, *, targets: bool) -> Arrays:
    """With targets, the last part of a sample is one."""

    def names(count: int) -> list[str]:
        if not targets:
            return input_names(model, count)
        if count < 2:
            raise UserError("data: a sample has one part, expected inputs and a target, as there is a loss")
        return [*input_names(model, count - 1), TARGET]

    found = read_arrays(data, names, split)
    if targets and TARGET not in found:
        raise UserError(f"data: has columns {', '.join(found)}, expected one called {TARGET!r}, as there is a loss")
    return found


def inputs_of(columns: Arrays) -> tuple[str, ...]:
    """All but the target."""
    return tuple(name for name in columns if name != TARGET)


@contextlib.contextmanager
def kept_folder(
    name: str, run: Path | None, overrides: Mapping[str, object], note: Callable[[str], None], *, resume: bool
) -> Generator[RunFolder]:
    """Yield the folder of a run of objects, written there before it begins. It goes again where nothing began."""
    parent = Path(str(overrides.get("run_dir", "runs")))
    if resume:
        yield chosen_folder(parent, name, resume=True, run=run, store=store_in(overrides), note=note)
        return
    folder = RunFolder.fresh(parent, name) if run is None else RunFolder.empty(run)
    try:
        yield folder
    finally:
        if not folder.begun:
            shutil.rmtree(folder.path / GIVEN, ignore_errors=True)
            (folder.path / CLIENT_NAMES).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or not made
                folder.path.rmdir()
