"""A job of Python objects: a module, a data set, a fleet and an optimizer in place of what a job file names."""

from __future__ import annotations

import contextlib
import gc
import glob
import inspect
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from isthmus.api.folder import GIVEN, RunFolder
from isthmus.api.run_session import Attached
from isthmus.api.stored_run import chosen_folder, store_in
from isthmus.data import DataSpec
from isthmus.data.dataset import ArrayDataset
from isthmus.errors import UserError, unknown_name, users_code
from isthmus.extensions import takes
from isthmus.fleet import Fleet, dump_fleet
from isthmus.job import Job, TrainingConfig, checked
from isthmus.models import ModelSpec, base_of
from isthmus.models.registry import GIVEN as GIVEN_MODEL
from isthmus.models.registry import WithLoss, give_model
from isthmus.overrides import overridden_struct
from isthmus.run_files import CLIENT_NAMES
from isthmus.training.optim import OptimizerConfig


class MapDataset(Protocol):
    """A map-style `torch.utils.data.Dataset`: sample i is a mapping by column, or a tuple in the order of the model's
    inputs."""

    def __len__(self) -> int: ...
    def __getitem__(self, sample: int, /) -> object: ...


Arrays = dict[str, NDArray[np.generic]]
Samples = Mapping[str, object] | MapDataset | Callable[..., object]
"""Columns by name (tensors or arrays, whose first dimension is the sample), a map-style data set, or a callable that
returns one of these; a callable that takes `split` is asked for "train" and "heldout"."""


def read_arrays(data: Samples, names: Callable[[int], list[str]], split: str = "train") -> Arrays:
    """Every sample, by column; `names` are those of the parts of a sample that is a tuple, by how many there are.

    All is held in memory at once: for data that do not fit, a job names a data set of your own as
    "package.module:callable", which devices read as they need it.
    Samples that are drawn at random are drawn once. UserError for a data set without a length, for samples that differ
    in columns or shape, and for values that are no plain numbers.

    >>> read_arrays([(torch.zeros(3), 1), (torch.ones(3), 0)], lambda count: ["x", "labels"])["labels"]
    array([1, 0])
    """
    if callable(data) and not hasattr(data, "__getitem__"):
        with users_code("data"):
            data = cast(Samples, data(split=split) if takes(data, "split") else data())
    if isinstance(data, Mapping):
        arrays = {str(name): _array(column, str(name)) for name, column in data.items()}
    else:
        arrays = _stacked(data, names)
    ArrayDataset(arrays, "data")  # which refuses what is no column
    return arrays


def write_arrays(arrays: Arrays, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def input_names(model: nn.Module, count: int) -> list[str]:
    """The first parameters of the model's forward. UserError where it takes fewer."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(base_of(model).forward).parameters.values() if p.kind in kinds]
    if len(names) < count:
        raise UserError(
            f"data: a sample has {count} parts, forward of {type(model).__name__} takes {len(names)} by name "
            f"({', '.join(names) or 'none'}): give a mapping by column, or a loss"
        )
    return names[:count]


def _stacked(data: object, names: Callable[[int], list[str]]) -> Arrays:
    missing = [name for name in ("__len__", "__getitem__") if isinstance(data, str) or not hasattr(data, name)]
    if missing:
        what = f"{type(data).__name__} has no {' and no '.join(missing)}"
        raise UserError(f"data: {what}, expected a mapping of columns, a map-style data set, or a callable")
    samples = cast(MapDataset, data)
    with users_code("data"):
        length = len(samples)
    rows: dict[str, list[NDArray[np.generic]]] = {}
    for number in range(length):
        with users_code(f"data: sample {number}"):
            sample = samples[number]
        named = _named(sample, names)
        if number and named.keys() != rows.keys():
            raise UserError(f"data: sample {number}: has columns {', '.join(named)}, sample 0 has {', '.join(rows)}")
        for name, value in named.items():
            found = _array(value, name)
            if number and found.shape != rows[name][0].shape:
                raise UserError(
                    f"data: sample {number}, column {name!r}: shape {found.shape}, sample 0 has {rows[name][0].shape}"
                )
            rows.setdefault(name, []).append(found)
    if not rows:
        raise UserError("data: holds no samples")
    return {name: np.stack(found) for name, found in rows.items()}


def _named(sample: object, names: Callable[[int], list[str]]) -> Mapping[str, object]:
    if isinstance(sample, Mapping):
        return cast("Mapping[str, object]", sample)
    parts = cast("Sequence[object]", sample) if isinstance(sample, tuple | list) else (sample,)
    return dict(zip(names(len(parts)), parts, strict=True))


def _array(value: object, name: str) -> NDArray[np.generic]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        return value.numpy()
    found: NDArray[np.generic] = np.asarray(value)
    if found.dtype == object:
        raise UserError(f"data: column {name!r}: got {type(value).__name__}, expected tensors, arrays or numbers")
    return found


Optimizer = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
_HOW = frozenset({"lr", "params", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Arguments that say how, not what, or that every optimizer has."""
_READ = {
    "sgd": frozenset({"momentum", "nesterov", "weight_decay"}),
    "adamw": frozenset({"betas", "eps", "weight_decay"}),
    "muon": frozenset({"momentum", "nesterov", "weight_decay", "adjust_lr_fn"}),
}
_IDLE: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "dampening": 0,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
}
"""Arguments that Isthmus has no setting for, and the value that is as if there were none."""
SCHEDULE_HINT = (
    ". Give the optimizer without a scheduler, and its schedule as [learning_rate]: overrides={'learning_rate': "
    "{'schedule': 'linear', 'warmup_steps': 50}}, or {'torch': 'OneCycleLR', 'options': {...}}"
)


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> tuple[OptimizerConfig, ...]:
    """The settings of an optimizer of the model's parameters, of a class, or of a `functools.partial` of one.

    UserError for another algorithm than SGD, Adam, AdamW and Muon, for an argument that jobs have no setting for, for a
    parameter that is not the model's, for one that requires a gradient and is in no group (a plain loop would leave
    it as it is, a run would train it), and for what a run would not go on with: a scheduler that has the optimizer,
    state of steps that it has made, and its hooks.

    >>> read_optimizer(torch.optim.SGD, torch.nn.Linear(2, 1))[0].name
    'sgd'
    """
    made = cast("object", _made(optimizer, model) if callable(optimizer) else optimizer)
    if not isinstance(made, torch.optim.Optimizer):
        hint = SCHEDULE_HINT if isinstance(made, LRScheduler) else ""
        raise UserError(f"optimizer: got {made!r:.80}, expected an optimizer of torch.optim, or a class of one{hint}")
    _refuse_what_is_lost(made)
    groups = _named_groups(made, model)
    if len(groups) == 1:
        return (_config(made, groups[0][0], "*"),)
    return tuple(_config(made, group, glob.escape(name)) for group, names in groups for name in names)


def _refuse_what_is_lost(made: torch.optim.Optimizer) -> None:
    """UserError for what moves or changes a plain loop's steps beside the settings: a run has the settings alone."""
    if (scheduler := _scheduler_of(made)) is not None:
        rates = ", ".join(f"{_number(group['lr']):g}" for group in made.param_groups[:4])
        raise UserError(
            f"optimizer: {scheduler} moves its learning rate, which is {rates} now: a run would keep that rate"
            f"{SCHEDULE_HINT}"
        )
    if any(value is not None for state in made.state.values() for value in cast("dict[str, object]", state).values()):
        raise UserError(
            "optimizer: it has made steps, and a run would begin without its state (momentum and the like): give a new "
            "one, or a class or functools.partial, as functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # torch has no public name for them
    if "step" in vars(made) or any(getattr(made, name, None) for name in hooks):
        raise UserError("optimizer: its step has a hook or was replaced, which a run would not call: give one without")


def _scheduler_of(made: torch.optim.Optimizer) -> str | None:
    """Says which schedulers have the optimizer, or that one that is gone had it; None without any.

    Schedulers note `initial_lr` and replace `step`. ReduceLROnPlateau leaves no trace: it is found by its reference.
    """
    owners: list[object] = []
    for holder in gc.get_referrers(made, getattr(made, "optimizer", made)):  # inside accelerate's
        owners += [holder, *(gc.get_referrers(holder) if isinstance(holder, dict) else ())]
    # `isinstance` would ask lazy proxies for their class.
    names = sorted({type(owner).__name__ for owner in owners if LRScheduler in type(owner).__mro__})
    if names:
        return f"a scheduler ({', '.join(names)})"
    traced = hasattr(vars(made).get("step"), "_wrapped_by_lr_sched")
    return "a scheduler" if traced or any("initial_lr" in group for group in made.param_groups) else None


def _named_groups(made: torch.optim.Optimizer, model: nn.Module) -> list[tuple[dict[str, object], list[str]]]:
    """Each group of the optimizer, and the names of its parameters."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[tuple[dict[str, object], list[str]]] = []
    for number, group in enumerate(cast("list[dict[str, object]]", made.param_groups)):
        parameters = cast("list[nn.Parameter]", group["params"])
        if any(id(parameter) not in known for parameter in parameters):
            raise UserError(f"optimizer: group {number} has a parameter that is not the model's")
        found.append((group, [known[id(parameter)] for parameter in parameters]))
    held = {name for _, names in found for name in names}
    left = [name for name, p in model.named_parameters() if p.requires_grad and name not in held]
    if left:
        raise UserError(
            f"optimizer: does not have parameter {left[0]!r} ({len(left)} such): give it to the optimizer, or call "
            "requires_grad_(False) on it"
        )
    return found


def _made(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    try:
        return make(model.parameters())
    except TypeError as e:
        raise UserError(f"optimizer: {make!r} cannot be called with parameters: {e}") from None


def _config(made: torch.optim.Optimizer, group: Mapping[str, object], pattern: str) -> OptimizerConfig:
    kind = type(made)
    decay = cast(float, group.get("weight_decay", 0.0))
    if kind is torch.optim.SGD:
        name = "sgd"
    elif kind is torch.optim.Muon:
        name = "muon"
    elif kind is torch.optim.AdamW or (kind is torch.optim.Adam and (not decay or group.get("decoupled_weight_decay"))):
        name = "adamw"
    elif kind is torch.optim.Adam:
        raise UserError(f"optimizer: Adam with weight_decay {decay:g} adds it to gradients: expected AdamW, or none")
    else:
        raise UserError(f"optimizer: got {kind.__name__}, expected SGD, Adam, AdamW or Muon of torch.optim")
    given: dict[str, object] = {"name": name, "pattern": pattern, "lr": _number(group["lr"])}
    for key, value in group.items():
        if key in _READ[name]:
            given[key] = "original" if value is None else value
            continue
        known = key in _HOW or (key in _IDLE and value == _IDLE[key])
        if not known:
            raise UserError(f"optimizer: {kind.__name__}: {key}: got {value!r}, which jobs have no setting for")
    return OptimizerConfig(**cast("dict[str, float]", given))  # pyright: ignore[reportArgumentType]


def _number(value: object) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else cast(float, value))


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
