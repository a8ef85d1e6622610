"""The learning rate by step: schedules of our own, and those of torch.optim.lr_scheduler by name.

Torch's schedulers go from step to step. Here each is a function of the step's number: stages ask it for the same number
and set the same rate, and a resumed run asks it for the step that it is at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import torch
from torch.optim import lr_scheduler

from isthmus.errors import UserError, unknown_name, users_code
from isthmus.extensions import check_options, import_object
from isthmus.wire_types import Count, NotNegative, Positive, Table, Text

NESTED, FUNCTION = "schedulers", "lr_lambda"
"""Arguments that hold other schedulers, and a function of the step's number."""
OURS = {"optimizer", "last_epoch"}  # arguments that are not the user's to give


class LearningRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning rate by step: a factor on every optimizer's own rate, or a scheduler of torch."""

    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt", "warmup-stable-decay"] = "constant"
    """After the warm-up: stays at 1; falls to `final` in a line or half a cosine; falls with the root of the step
    number; or stays at 1 and falls to `final` in a line over the last `decay_steps`."""
    warmup_steps: Count = 0  # Steps over which the factor rises linearly from 1/warmup_steps to 1.
    decay_steps: Positive | None = None  # Steps of decay, for `warmup-stable-decay`; without it a fifth of the run.
    final: NotNegative = 0.1  # The factor in the last step, unless the schedule is `constant` or `inverse-sqrt`.
    torch: Text = ""
    """A class of torch.optim.lr_scheduler in place of all that: each optimizer has one of its own, with a step of it
    after each step of training."""
    options: Table[Text, object] = {}
    """Its arguments. `schedulers` are tables with `torch` and `options`; a function is "package.module:function"."""

    def __post_init__(self) -> None:
        if self.decay_steps is not None and self.schedule != "warmup-stable-decay":
            raise ValueError(f"decay_steps: got it with schedule {self.schedule!r}, expected 'warmup-stable-decay'")
        if self.options and not self.torch:
            raise ValueError("options: got some without the key torch, expected the name of a scheduler there")
        if self.torch and (self.schedule, self.warmup_steps) != ("constant", 0):
            raise ValueError("torch: got it with a schedule or warmup_steps, expected one of the two")

    def factor(self, step: int, steps: int) -> float:
        """The factor of step number `step` (from 0) in a run of `steps`; of torch's schedulers see `TorchSchedule`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        match self.schedule:
            case "constant":
                return 1.0
            case "inverse-sqrt":
                peak = max(1, self.warmup_steps)
                return math.sqrt(peak / max(peak, step + 1))
            case "linear":
                return self._line(self._progress(step, self.warmup_steps, steps))
            case "cosine":
                progress = self._progress(step, self.warmup_steps, steps)
                return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
            case "warmup-stable-decay":
                decay_steps = math.ceil(steps / 5) if self.decay_steps is None else self.decay_steps
                return self._line(self._progress(step, max(self.warmup_steps, steps - decay_steps), steps))

    def _line(self, progress: float) -> float:
        return 1 + (self.final - 1) * progress

    @staticmethod
    def _progress(step: int, first: int, steps: int) -> float:
        """0 in step `first`, 1 after the last one."""
        return min(1.0, max(0, step - first) / max(1, steps - first))

    def tabled(self, steps: int) -> LearningRate:
        """The same with a table of `steps` values in place of each function, as devices get it: they import nothing
        that a message names. UserError for a function that cannot be imported, or that raises."""
        return msgspec.structs.replace(self, options=_tabled(self.torch, self.options, steps)) if self.torch else self


CONSTANT = LearningRate()


def schedulers() -> list[str]:
    """The classes of torch that are functions of the step's number."""
    without = {"LRScheduler", "ReduceLROnPlateau"}
    return sorted(set(lr_scheduler.__all__) - without)


class TorchSchedule:
    """A scheduler of torch on an optimizer that updates nothing: what a step of training sets its own groups to."""

    def __init__(self, make: Callable[[], torch.optim.Optimizer], schedule: LearningRate, steps: int) -> None:
        """`schedule` as `tabled` gives it. UserError for one that torch refuses, or that ends before `steps`."""
        self._make, self._schedule = make, schedule
        self._begin()
        _check(self._optimizer, self._scheduler, steps)

    def _begin(self) -> None:
        self._optimizer = self._make()
        self._scheduler = _built(self._optimizer, self._schedule.torch, self._schedule.options)
        self._optimizer.step()  # a scheduler warns where none came before its own
        self._step = 0

    def __call__(self, step: int) -> Mapping[str, object]:
        """Return the settings that it changes: the learning rate, and momentum or betas where it cycles them."""
        if step < self._step:
            self._begin()
        while self._step < step:
            self._scheduler.step()
            self._step += 1
        group = cast("dict[str, object]", self._optimizer.param_groups[0])
        return {key: group[key] for key in ("lr", "momentum", "betas") if key in group}


def _built(optimizer: torch.optim.Optimizer, name: str, options: Mapping[str, object]) -> lr_scheduler.LRScheduler:
    made = {**options}
    if NESTED in options:
        made[NESTED] = [_built(optimizer, *_table(name, one)) for one in cast("Sequence[object]", options[NESTED])]
    if FUNCTION in options:
        made[FUNCTION] = cast("list[float]", options[FUNCTION]).__getitem__
    try:
        return _class_of(name, options)(optimizer=optimizer, **made)
    except UserError:
        raise
    except Exception as e:  # each class raises its own
        raise UserError(f"learning_rate: {name}: {' '.join(str(e).split())}") from e


def _class_of(name: str, options: Mapping[str, object]) -> Any:
    """UserError for a name that torch has not, one that needs more than the step's number, and for an argument."""
    if name == "ReduceLROnPlateau":
        raise UserError("learning_rate.torch: ReduceLROnPlateau needs a metric, expected a scheduler by step")
    if name not in schedulers():
        raise unknown_name("learning_rate.torch", name, schedulers())
    found = getattr(lr_scheduler, name)
    check_options(f"learning_rate option of {name}", found, options, OURS)
    if "scale_fn" in options:
        raise UserError(f"learning_rate: {name}: scale_fn: got a function, expected one of torch's modes")
    return found


def _table(owner: str, one: object) -> tuple[str, Mapping[str, object]]:
    """The name and options of a scheduler inside another."""
    table = cast("Mapping[str, object]", one) if isinstance(one, Mapping) else {}
    name, options = table.get("torch"), table.get("options", {})
    if not isinstance(name, str) or not isinstance(options, Mapping) or not table.keys() <= {"torch", "options"}:
        raise UserError(f"learning_rate: {owner}: schedulers: got {one!r}, expected a table with torch and options")
    return name, cast("Mapping[str, object]", options)


def _tabled(name: str, options: Mapping[str, object], steps: int) -> dict[str, object]:
    made = {**options}
    inner = made.get(NESTED)
    if isinstance(inner, Sequence) and not isinstance(inner, str):
        tables = [_table(name, one) for one in cast("Sequence[object]", inner)]
        made[NESTED] = [{"torch": t, "options": _tabled(t, o, steps)} for t, o in tables]
    elif inner is not None:
        raise UserError(f"learning_rate: {name}: schedulers: got {inner!r}, expected a list of tables")
    if FUNCTION in made:
        made[FUNCTION] = _values(name, made[FUNCTION], steps)
    return made


def _values(name: str, given: object, steps: int) -> list[float]:
    """Return the values of a function that the user names, in every step."""
    if not isinstance(given, str):
        raise UserError(f"learning_rate: {name}: {FUNCTION}: got {given!r:.80}, expected 'package.module:function'")
    function = import_object(f"learning_rate: {name}: {FUNCTION}", given)
    with users_code(f"learning_rate: {name}: {given}"):
        return [float(cast("Callable[[int], float]", function)(step)) for step in range(steps)]


def _check(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, steps: int) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):
        _check(optimizer, inner, 0)  # it may have fewer steps to do
    name = type(scheduler).__name__
    total = getattr(scheduler, "total_steps", steps)
    if total < steps:
        raise UserError(f"learning_rate: {name}: total_steps: got {total}, expected training.steps ({steps}) at least")
    # Of SGD without momentum neither plan nor checkpoint has a momentum's memory.
    if getattr(scheduler, "cycle_momentum", False) and optimizer.defaults.get("momentum") == 0:
        raise UserError(
            f"learning_rate: {name}: it cycles momentum, and the optimizer has none: expected momentum above 0, or "
            "options.cycle_momentum = false"
        )
