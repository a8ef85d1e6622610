"""A mode acts inside backward and at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.plans.sync import SyncPlan
from isthmus.sync.averaging import Averager, CompressedAverager, MeasuredAverage
from isthmus.sync.exchange import from_bytes
from isthmus.sync.layers import FlatModel, Layer, spans
from isthmus.sync.monitor import Monitor, PeriodReport
from isthmus.sync.options import Options
from isthmus.sync.updates import Closure, Updates
from isthmus.training.compression import DeltaCodec

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The objects that every mode works on."""

    module: nn.Module
    model: FlatModel  # the module's layers
    updates: Updates
    averager: Averager
    monitor: Monitor
    period: int
    options: Options
    codec: DeltaCodec | None = None  # the codec of the deltas that `outer` and `streaming` exchange

    def delta_averager(self) -> Averager | CompressedAverager:
        """For the same deltas each time."""
        if self.codec is None:
            return self.averager
        return CompressedAverager(self.averager, self.codec, self.options.error_decay)


class Mode:
    """One way to keep the replicas together."""

    in_backward = False  # whether `ready` and `backward_ended` are to be called
    updates_in_backward = False  # whether a change of gradients after the backward pass comes too late
    resets_each_backward = False
    """Whether several backward passes may come before one step, each with all gradients anew."""
    plan: SyncPlan | None = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.steps = 0  # how many have been made
        self.periods = 0
        self.own_period = setting.period  # steps of this worker in a period
        self._in_period = 0  # how many of them have been made

    @property
    def finished(self) -> bool:
        """Return whether all workers together have made what was to be made."""
        return False

    @property
    def samples(self) -> int | None:
        """Samples of all workers so far; None where they count nothing but steps."""
        return None

    @property
    def sent_bytes(self) -> int:
        return self.setting.averager.sent_bytes

    def ready(self, number: int) -> None:
        """All gradients of layer `number` are there. Called inside backward."""

    def backward_ended(self) -> None:
        """All gradients are there."""

    def accept_gradients(self) -> None:
        """They count as unchanged since the backward pass."""

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        """Update, average what is due. Returns the closure's loss. The caller counts the step, afterwards."""
        raise NotImplementedError

    def count(self) -> None:
        """A step was made."""
        ends_period = self.ends_period
        self.steps += 1
        self.periods += ends_period
        self._in_period = 0 if ends_period else self._in_period + 1

    def counts(self) -> Tensor:
        """Return the counts that `recount` takes."""
        return torch.tensor([self.steps, self.periods, self.own_period, self._in_period])

    def recount(self, counts: Tensor) -> None:
        """Go on from a saved place."""
        self.steps, self.periods, self.own_period, self._in_period = counts.tolist()

    def stepped(self) -> None:
        """The step is counted."""

    def wait(self) -> None:
        """Until nothing changes the parameters any more before the next step."""

    def detach(self) -> None:
        """Take away what was put on the model."""

    def period_ended(self, report: PeriodReport | None) -> None:
        """All workers are at the end of a period; `report` is what they said of the one before."""

    def state(self) -> dict[str, Tensor]:
        """Return the state that is lost with the process: tensors by name."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`. Raises UserError for one that does not fit."""

    @property
    def ends_period(self) -> bool:
        """Return whether the step that is being made is the last of its period."""
        return self._in_period + 1 == self.own_period

    def average(self, layers: Sequence[Layer]) -> None:
        """Average the parameters of some layers and wait; `Gamma` is noted."""
        measured = MeasuredAverage(self.setting.averager, spans(layers))
        with self.setting.monitor.waiting():
            self.setting.monitor.diverged(measured.wait())


def restored(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """One tensor of a saved state. Raises UserError unless it is there with the shape of `like`."""
    if name not in state:
        raise UserError(f"saved sync state: {name!r} is missing. Was it saved in this mode?")
    if state[name].shape != like.shape:
        raise UserError(
            f"saved sync state: {name!r}: got shape {tuple(state[name].shape)}, expected {tuple(like.shape)}. Is it "
            "the same model?"
        )
    return state[name].to(like.device, like.dtype)


def restored_document(state: Mapping[str, Tensor], name: str, kind: type[T]) -> T:
    """The value that `exchange.to_bytes` packed under this name. UserError if it is missing or of another kind."""
    if name not in state:
        raise UserError(f"saved sync state: {name!r} is missing. Was it saved in this mode?")
    try:
        return from_bytes(state[name], kind)
    except UserError as error:
        raise UserError(f"saved sync state: {name!r}: {error}: expected what Sync.state_dict() gave") from None
