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

TARGET = "target"
"""Column of what a loss is given beside the model's output."""
MOST_MICRO_BATCHES = 8
DEFAULT_STEPS, DEFAULT_BATCH = 100, 32


class Given(Attached, total=False):
    """What a run can be given in place of a job. `model` and `data` are needed."""

    model: nn.Module | Callable[[], nn.Module]
    """Its forward takes the data's columns and returns a scalar loss, unless there is a `loss`."""
    data: Samples
    """A mapping of columns, a map-style data set, or a callable that returns one of these."""
    loss: Callable[..., Tensor]
    """Called as loss(model(*inputs), target) on samples of several parts, of which the last is the target."""
    fleet: Fleet | str | Path
    """By default the built-in `laptop`."""
    optimizer: Optimizer
    """Of torch: an instance, a class or a `functools.partial` of one; by default AdamW with lr 1e-3."""
    steps: int
    """Optimizer steps; by default 100."""
    batch: int
    """Samples per step; by default 32."""
    name: str
    """Of the run: its folder is runs/NAME."""


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
    """What was given, read and checked."""

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
        self.heldout = columns_of(data, built, "heldout", targets=loss is not None) if _has_split(data) else None
        self.name = given.get("name") or type(built).__name__.lower()
        self._source = model
        if loss is not None:
            self._source = built = WithLoss(built, loss, inputs_of(self.train), TARGET)
        self.model = built

    def job(self, folder: Path, overrides: Mapping[str, object]) -> Job:
        """A job whose data and fleet are files of this folder, which are written if they are not there."""
        given, batch = self._given, self._given.get("batch", DEFAULT_BATCH)
        paths = {"path": folder / "train.npz", "heldout_path": folder / "heldout.npz"}
        for path, arrays in zip(paths.values(), (self.train, self.heldout), strict=True):
            if arrays is not None and not path.is_file():
                write_arrays(arrays, path)
        options: dict[str, object] = {key: str(path.absolute()) for key, path in paths.items() if path.is_file()}
        job = Job(
            name=self.name,
            model=ModelSpec(name=give_model(self._source)),
            data=DataSpec(kind="npz", options=options),
            fleet=fleet_name(given.get("fleet", "laptop"), folder),
            training=TrainingConfig(
                steps=given.get("steps", DEFAULT_STEPS), batch_size=batch, micro_batches=micro_batches_of(batch)
            ),
        )
        if (optimizer := given.get("optimizer")) is not None:
            job = msgspec.structs.replace(job, optimizer=read_optimizer(optimizer, self.model))
        return checked(overridden_struct(job, overrides, "job"))


def micro_batches_of(batch: int) -> int:
    """The most parts of equal size, of up to 8."""
    if batch < 1:
        raise UserError(f"batch: got {batch}, expected at least 1")
    return next(count for count in range(MOST_MICRO_BATCHES, 0, -1) if batch % count == 0)


def fleet_name(fleet: Fleet | str | Path, folder: Path) -> str:
    """As a job names it; a struct is written to the folder."""
    if isinstance(fleet, str | Path):
        return str(fleet)
    if not isinstance(fleet, Fleet):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"fleet: got {fleet!r:.80}, expected a Fleet, a built-in fleet's name or a path")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fleet.toml"
    path.write_text(dump_fleet(fleet), encoding="utf-8")
    return str(path.absolute())


def is_given(job: Job) -> bool:
    """Whether the job's model is a Python object of its caller."""
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
    """Of a run of objects, which are written there before it begins. It goes again where nothing began."""
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
            with contextlib.suppress(OSError):  # not empty, or not made
                folder.path.rmdir()
