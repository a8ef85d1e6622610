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

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from isthmus.errors import InternalError, IsthmusError
from isthmus.session.session import Loss, Observation, Session
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


class PlanPort(Port, Protocol):
    """The interface of a program whose members are the devices of a plan."""

    def release(self, device: str) -> None:
        """The device may leave: nothing depends on it any more."""


PortT = TypeVar("PortT")
SessionPortT = TypeVar("SessionPortT", bound=PlanPort)
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


class Program(Policy[SessionPortT], Session):
    """A policy whose members are the devices of a plan, which changes when one is lost."""

    def __init__(
        self,
        port: SessionPortT,
        members: Sequence[str],
        fleet: Collection[str],
        *,
        timeout_s: float,
        start_s: float = 0.0,
    ) -> None:
        """`members` take part at first. `fleet` are all devices that may be called. Times: as `Session`."""
        Policy.__init__(self, JOINING)
        Session.__init__(self, port.note, timeout_s=timeout_s, start_s=start_s)
        self.port = port
        self.epoch = 0
        self.members = tuple(members)
        self.losses = 0  # members that were lost
        self._fleet = tuple(fleet)
        self._called = set(members)
        self._out: set[str] = set()  # devices that were lost and are not back

    @property
    def over(self) -> bool:
        return self.phase == OVER

    @property
    def usable(self) -> tuple[str, ...]:
        """Devices that may be members."""
        return tuple(name for name in self._fleet if name not in self._out)

    @property
    def expected(self) -> Collection[str]:
        return set(self.members) - self.connected if self.phase == JOINING else ()

    @property
    def concerned(self) -> Collection[str]:
        return self.usable

    def is_late(self, device: str, body: Event) -> bool:
        return body.epoch != self.epoch or device not in self.members

    # What a program decides

    def all_here(self) -> None:
        """Every member has joined, and the program goes on."""
        raise NotImplementedError

    def choose(self, devices: Sequence[str]) -> Sequence[str]:
        """Return members, of these devices. IsthmusError where they are too few."""
        raise NotImplementedError

    def go_on(self, device: str, reason: str) -> None:
        """A member is lost: choose members again, and rebuild. The session ends where this raises IsthmusError."""
        raise NotImplementedError

    # What the host says

    def joined(self, device: str) -> None:
        self.connected.add(device)
        self._out.discard(device)
        if self.phase == JOINING:
            self._begin()

    def heard(self, device: str, body: msgspec.Struct) -> None:
        """Take a report. A member that says what it cannot have to say now is lost."""
        try:
            super().heard(device, body)
        except OutOfPhase as e:
            self.disbelieve(device, e)

    def lost(self, loss: Loss) -> None:
        device, reason = loss.device, loss.reason
        self.forget(device)
        self._out.add(device)
        self.port.reject(device, permanent=loss.permanent)
        if device not in self.members:
            return
        self.losses += 1
        self.epoch += 1
        if not self.usable:
            self.end(f"no device is left: {device}: {reason}")
            return
        try:
            self.go_on(device, reason)
        except IsthmusError as e:
            self.end(str(e))

    def looked(self, seen: Observation) -> None:
        super().looked(seen)
        if seen.leaving and not self.over:
            self._let_go(seen.leaving)

    def _let_go(self, leaving: frozenset[str]) -> None:
        """Go on without these devices, or with all members where the others are too few."""
        members, asked = self.members, sorted(leaving & (self.connected | set(self.members)))
        if not leaving.isdisjoint(members):
            try:
                members = tuple(self.choose([name for name in self.usable if name not in leaving]))
            except IsthmusError as e:
                for device in asked:
                    self.port.note(f"{device} was asked to leave and stays: {e}")
                return
            self.epoch += 1
        for device in asked:
            self.forget(device)
            self.port.release(device)
            self.port.note(f"{device} has left: it was asked to")
        self._out |= leaving
        if members is not self.members:
            self.rebuild(members)

    def stop(self) -> None:
        """The end that was asked for."""
        self.end("")

    # What a program may do

    def rebuild(self, members: Sequence[str]) -> None:
        """Go on with these members under the present epoch. Those that were never called are called."""
        self.members, self.phase = tuple(members), JOINING
        for device in members:
            if device not in self._called:
                self._called.add(device)
                self.port.call(device)
        self._begin()

    def end(self, reason: str) -> None:
        if not self.over:
            self.phase = OVER
            self.port.ended(reason)

    def _begin(self) -> None:
        if self.connected.issuperset(self.members):
            self.all_here()
