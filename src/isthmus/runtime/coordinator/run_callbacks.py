"""The words between a coordinator's host and the run around it: the outcome of a run, weights from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec
from torch import Tensor

from isthmus.disclosure import PrivacySpent
from isthmus.errors import IsthmusError
from isthmus.plans import PlanPeriod
from isthmus.protocol.members import Recovery
from isthmus.protocol.run_messages import Item, WeightExchange
from isthmus.protocol.run_ports import Ending
from isthmus.protocol.step_failures import MemoryPeak
from isthmus.trace import Span

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
