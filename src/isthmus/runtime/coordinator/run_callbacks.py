"""Callbacks of a coordinator for its work besides coordination, and the outcome of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
from torch import Tensor

from isthmus.disclosure import PrivacySpent
from isthmus.errors import IsthmusError
from isthmus.plans import PlanPeriod
from isthmus.protocol.adaptation import PlanFigures
from isthmus.protocol.fingerprints import StepFingerprint
from isthmus.protocol.interruptions import Recovery
from isthmus.protocol.memory_shortage import MemoryPeak
from isthmus.protocol.recovery import StateLayout
from isthmus.protocol.run_messages import WeightExchange
from isthmus.protocol.run_ports import Ending, EpochStart, PlanRequest
from isthmus.protocol.work import Item
from isthmus.runtime.messages.assignment import Assignment
from isthmus.trace import Span
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader

FaultKind = Literal["joined", "lost", "left"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, and its results."""

    outcome: Ending
    reason: str
    spans: tuple[Span, ...]  # times count from the first item's opening. Of a long run, the first `MOST_SPANS`.
    elapsed_s: float  # since the first item's opening; 0 when there was none
    late_s: Mapping[str, float]  # per device, by how much real computing overran its emulated duration
    failure: IsthmusError | None = None  # why the run could not go on
    recoveries: tuple[Recovery, ...] = ()
    origin_s: float = 0.0  # the monotonic clock at the first item's opening; 0 when there was none
    periods: tuple[PlanPeriod, ...] = ()  # the run's plans
    peaks: Mapping[str, MemoryPeak] = {}  # the peak of each device's stage under the last plan
    spent: PrivacySpent | None = None
    """The privacy that messages spent in this session and those before it; None where nothing covers them."""


class Address(NamedTuple):
    """Where a device listens for others, and the id of its key, empty where connections are plain TCP."""

    host: str
    port: int
    id: str = ""


class WeightAmounts(NamedTuple):
    """Amounts that come with a training step from outside of the run."""

    exchange: WeightExchange
    amounts: Mapping[str, Tensor]  # amounts by the module's own names of parameters


class WeightExchanges(Protocol):
    """The weight exchanges of a run whose weights others change too."""

    def opened(self, item: Item) -> WeightAmounts:
        """With a training step. A step that is made again is opened again, and gets the same."""
        ...

    def collected(self, item: Item, values: Mapping[str, Tensor]) -> None:
        """A device's part of what the step's exchange wanted, when the step begins there. It comes again where the step
        is made again."""
        ...


class RunCallbacks(Protocol):
    """The work of a run besides coordination: plans, assignments, weights, checkpoints, progress."""

    def plan(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures | None]:
        """A plan for these devices, with its figures where the run can tell plans apart. Any thread. UserError when
        there is none."""
        ...

    def begin(self, start: EpochStart, layout: StateLayout) -> None:
        """An epoch begins. What it goes on from is to be on record when this returns."""
        ...

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """Parts of the state that the epoch goes on from, out of a device's memory."""
        ...

    def assignments(self, addresses: Mapping[str, Address]) -> Mapping[str, Assignment]: ...

    def is_known(self, device: str) -> bool:
        """Return whether plans can be made with a device that came: it was asked what data it has."""
        ...

    def weights(self, device: str, own: frozenset[str]) -> Mapping[str, Tensor]:
        """Return the weights that a device's stage needs, but for the parts that it has itself."""
        ...

    def check_state(self, device: str, tensors: Sequence[TensorHeader]) -> None:
        """Before they are received: PeerError unless they are the device's part of a checkpoint. Any thread."""
        ...

    def check_parts(self, tensors: Sequence[TensorHeader]) -> None:
        """Before they are received: PeerError unless they are parts of the model. Any thread."""
        ...

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parts of the model."""
        ...

    def updates(self) -> tuple[frozenset[str], EngineConfig]:
        """Return the parts that optimizers update, and the engine's settings for that."""
        ...

    def opened(self, item: Item) -> WeightAmounts | None:
        """Devices are about to hear of the item: what it makes leave them is to be on record when this returns. What
        comes with it, if anything does."""
        ...

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        """Every device has finished the item; `spans` are those reported since the last call."""
        ...

    def evaluated(self, item: Item, sums: Sequence[float]) -> None:
        """A part of an evaluation is done: its losses, counts, and sums and counts of metrics."""
        ...

    def emulated(self, link: tuple[str, str]) -> float | None:
        """Bytes/s of a link that is emulated here. Any thread."""
        ...

    def acknowledged(self, step: int) -> None:
        """The state after this step is held by more than one device."""
        ...

    def saved(self, item: Item, device: str, state: Mapping[str, Tensor], peak: MemoryPeak | None) -> None:
        """A device's part of a checkpoint is here, and the most memory that it had so far."""
        ...

    def weights_read(self, item: Item, weights: Mapping[str, Tensor]) -> None:
        """A device's part of what the step's exchange wanted is here."""
        ...

    def fingerprinted(self, device: str, found: Sequence[StepFingerprint]) -> None:
        """A device's fingerprints of steps are here."""
        ...

    def commit(self, item: Item, *, finite: bool) -> None:
        """All parts are here; `finite`: their weights are."""
        ...

    def note(self, text: str) -> None:
        """Something that a person may want to know."""
        ...

    def fault(self, kind: FaultKind, worker: str, reason: str = "") -> None:
        """A device's worker joins, is lost or leaves."""
        ...
