"""Exchanges of replicas: which start in which step and in which order, one schedule for runs, plans and simulations;
and the outer step of DiLoCo and Streaming DiLoCo.

step            0     1     2     3     4     5     6     7         period 4, fragments a b c d, delay 1
starts          a     b     c     d     a     b     c     d
ends                  a     b     c     d     a     b     c
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from isthmus.errors import UserError
from isthmus.wire_types import Above, Count

RATE, MOMENTUM = 0.7, 0.9  # diLoCo's
DELAY, MIXING = 1, 0.5  # streaming DiLoCo's values


class OuterOptimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGD with Nesterov momentum on the mean of what the replicas have moved since the last outer step.

    DiLoCo (2023, Alg. 1) has no delay and no mixing, Streaming DiLoCo (2025, Alg. 2) has both.
    """

    rate: Above = RATE
    momentum: Annotated[float, Meta(ge=0, lt=1)] = MOMENTUM
    delay: Count = 0  # steps between the start of an exchange and its use: tau. 0 waits for it.
    mixing: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of a replica's own parameters that stays when the outer ones arrive: alpha."""


T = TypeVar("T")


class FragmentEvent(NamedTuple):
    """The exchange of a fragment starts, or a worker waits for its result and uses it."""

    kind: Literal["start", "end"]
    fragment: int


@dataclass(frozen=True, kw_only=True)
class FragmentSchedule:
    """Fragments take turns in a period (Streaming DiLoCo, 2025, Alg. 2). One fragment and no delay: the whole model in
    the last step of each period (local SGD, DiLoCo)."""

    period: int
    count: int
    delay: int = 0  # steps between the start of an exchange and its end: tau. A period at most.

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= self.period:
            raise UserError(f"delay: got {self.delay}, expected at most the period of {self.period}")

    @classmethod
    def streaming(cls, *, layers: int, period: int, fragments: int = 0, delay: int = 0) -> FragmentSchedule:
        """Return as many fragments as asked for, 0 for one per step of the period; no more than layers or steps."""
        return cls(period=period, count=min(fragments or period, layers, period), delay=delay)

    def fragment_of(self, layer: int) -> int:
        """Strided as in the paper: each fragment holds some of the first layers and some of the last."""
        return layer % self.count

    def step_of(self, fragment: int) -> int:
        """The step of a period after which its exchange starts: spread evenly over the period."""
        return (fragment + 1) * self.period // self.count - 1

    def events(self, step: int) -> Iterator[FragmentEvent]:
        """Yield the events after a step's update, in order: a fragment that ends and starts in one step ends first."""
        if self.delay:
            yield from self._events("end", step - self.delay)
        yield from self._events("start", step)
        if not self.delay:
            yield from self._events("end", step)

    def _events(self, kind: Literal["start", "end"], started: int) -> Iterator[FragmentEvent]:
        for fragment in range(self.count):
            if started >= 0 and started % self.period == self.step_of(fragment):
                yield FragmentEvent(kind, fragment)


class SendOrder(Generic[T]):
    """The messages of one step, each of some layers. They start in this order on every worker, each as soon as all its
    layers are ready, whatever the order in which layers become ready."""

    def __init__(self, messages: Sequence[Collection[T]]) -> None:
        self.complete: set[T] = set()  # the layers that are ready
        self._messages = messages
        self._started = 0

    def ready(self, layer: T) -> Iterator[int]:
        """The numbers of the messages that start now."""
        self.complete.add(layer)
        while self._started < len(self._messages) and self.complete.issuperset(self._messages[self._started]):
            self._started += 1
            yield self._started - 1
