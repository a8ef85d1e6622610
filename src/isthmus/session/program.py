"""The kernel of every program: members join, are lost and are called; the program decides what they do.

A program is pure: it holds no connection and no clock. What happens is a call of one of its methods. What it wants
done is a call of its port, which a host implements. A port method does not call the program back.

One rule holds for reports of members that do not fit, in every program:

- A report that arose under another epoch, or that comes from a device that is no member, is late: it is counted and
  dropped.
- A report in a phase in which the program has no use for it raises `OutOfPhase`: the host expels its sender.
- A program that is over drops everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from isthmus.errors import InternalError
from isthmus.wire_types import Count

JOINING, OVER = "joining", "over"  # the first phase and the last one of every program


class OutOfPhase(InternalError):
    """A device reported what it cannot have to report now: a host expels it."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened under a plan."""

    epoch: Count = 0  # the plan epoch under which it arose


class Port(Protocol):
    """The interface of every program of a session to its host."""

    def call(self, device: str) -> None:
        """Ask a device of the fleet to join."""

    def note(self, text: str) -> None:
        """Tell people."""

    def reject(self, device: str, *, permanent: bool) -> None:
        """Hang up on a device that is lost. `permanent`: nor take it again."""

    def ended(self, reason: str) -> None:
        """Nothing follows. `reason` is empty where the end was asked for."""


PortT = TypeVar("PortT")
PolicyT = TypeVar("PolicyT", bound="Policy[Any]")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class _Report(NamedTuple):
    method: Callable[[Any, str, Any], None]
    phases: tuple[str, ...]


def report(
    kind: type[BodyT], *phases: str
) -> Callable[[Callable[[PolicyT, str, BodyT], None]], Callable[[PolicyT, str, BodyT], None]]:
    """Mark the method that takes reports of this kind, which members send in these phases."""

    def mark(method: Callable[[PolicyT, str, BodyT], None]) -> Callable[[PolicyT, str, BodyT], None]:
        vars(method)["takes"] = (kind, phases)
        return method

    return mark


class Policy(Generic[PortT]):
    """It receives reports and asks a port. A subclass marks its methods by `report`."""

    reports: ClassVar[dict[type[msgspec.Struct], _Report]] = {}
    port: PortT

    def __init_subclass__(cls) -> None:
        marked = ((method, getattr(method, "takes", None)) for method in vars(cls).values())
        cls.reports = cls.reports | {takes[0]: _Report(method, takes[1]) for method, takes in marked if takes}

    def __init__(self, first: str) -> None:
        """`first` is the phase in which it begins."""
        self.phase = first
        self.stale = 0  # late reports that were dropped

    @property
    def over(self) -> bool:
        return self.phase == OVER

    def is_late(self, device: str, body: Any) -> bool:
        """A report arose under what is no longer so."""
        return False

    def dropped(self, device: str, body: Any) -> None:
        """A late report was dropped."""

    def heard(self, device: str, body: msgspec.Struct) -> None:
        """Take a report. OutOfPhase for one that its sender cannot have to make now."""
        if self.is_late(device, body):
            self.stale += 1
            self.dropped(device, body)
        elif not self.over:
            taken = self.reports.get(type(body))
            if taken is None or self.phase not in taken.phases:
                raise OutOfPhase(f"{type(body).__name__} came in phase {self.phase!r}")
            taken.method(self, device, body)
