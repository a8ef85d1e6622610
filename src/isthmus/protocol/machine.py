"""The kernel of every state machine: events in, instructions out, and one literal table of phases.

    table[phase][event] = the phases that may follow

One rule for events that do not fit, in every machine:

- An event that arose under another plan epoch, or in another phase of a round, is late: it is dropped and counted.
- An event that the table does not have for the phase raises `OutOfPhase`: the host expels the peer that sent it, or
  has a fault of its own.
- A machine that is over drops everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar, cast

import msgspec

from isthmus.errors import InternalError
from isthmus.session.program import Event, OutOfPhase

BodyT_co = TypeVar("BodyT_co", bound=msgspec.Struct, covariant=True)


class FromDevice(msgspec.Struct, Generic[BodyT_co], frozen=True):
    """An event that a device sent, or a federated executor. The host knows it from the connection: the body does not
    name it."""

    device: str
    body: BodyT_co

    @property
    def epoch(self: FromDevice[Event]) -> int:
        return self.body.epoch


def kind_of(event: msgspec.Struct) -> type[msgspec.Struct]:
    """The type by which a table knows the event: of a device's event, that of its body."""
    if type(event) is FromDevice:  # isinstance takes twice as long, and each event of a simulation comes by here
        return type(event.body)
    return type(event)


PhaseT = TypeVar("PhaseT", bound=str)
EventT = TypeVar("EventT", bound=msgspec.Struct)
EpochEventT = TypeVar("EpochEventT", bound=Event | FromDevice[Event])
InstructionT = TypeVar("InstructionT")

Table = Mapping[str, Mapping[type[msgspec.Struct], str]]
"""The names of the phases that may follow, in one string, by phase and event."""


class Transitions:
    """A table, read once: `following` gives the phases after an event."""

    def __init__(self, first: str, over: str, table: Table) -> None:
        """A machine begins in the phase `first`; in the phase `over` it drops every event. InternalError for a phase
        without a row."""
        self.first = first
        self.over = over
        self.table = table
        self._following = {
            (phase, event): frozenset(then.split()) for phase, row in table.items() for event, then in row.items()
        }
        unknown = {phase for then in self._following.values() for phase in (*then, first)} - {*table, over}
        if unknown:
            raise InternalError(f"phases without a row: {', '.join(sorted(unknown))}")

    def following(self, phase: str, event: type[msgspec.Struct]) -> frozenset[str]:
        """Raises OutOfPhase where the table has none."""
        try:
            return self._following[phase, event]
        except KeyError:
            raise OutOfPhase(f"{event.__name__} came in phase {phase!r}") from None

    @property
    def changes(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The names of the events that lead from a phase to a different one, by pair of phases."""
        found: dict[tuple[str, str], list[str]] = {}
        for (phase, event), then in self._following.items():
            for other in then - {phase}:
                found.setdefault((phase, other), []).append(event.__name__)
        return {pair: tuple(sorted(names)) for pair, names in sorted(found.items())}


class Machine(Generic[PhaseT, EventT, InstructionT]):
    """A state machine. A subclass gives its `transitions` and takes an event in `_take`."""

    transitions: ClassVar[Transitions]

    def __init__(self) -> None:
        self._phase: PhaseT = cast(PhaseT, self.transitions.first)
        self._stale = 0

    @property
    def phase(self) -> PhaseT:
        return self._phase

    @property
    def stale(self) -> int:
        """How many late events were dropped."""
        return self._stale

    def handle(self, event: EventT) -> list[InstructionT]:
        """Take one event; return what to do now. Raises OutOfPhase for one that the table does not have."""
        if self._is_stale(event):
            self._stale += 1
            return self._answer_stale(event)
        before, transitions = self._phase, self.transitions
        if before == transitions.over:
            return []
        kind = kind_of(event)
        following = transitions.following(before, kind)
        out = self._take(event)
        if self._phase not in following:
            raise InternalError(
                f"{type(self).__name__}: {kind.__name__} led from {before!r} to {self._phase!r}, "
                f"expected {' or '.join(sorted(following))}"
            )
        return out

    def _is_stale(self, event: EventT) -> bool:
        raise NotImplementedError

    def _answer_stale(self, event: EventT) -> list[InstructionT]:
        """The answer to a late event whose sender waits for one."""
        return []

    def _take(self, event: EventT) -> list[InstructionT]:
        raise NotImplementedError


class EpochMachine(Machine[PhaseT, EpochEventT, InstructionT]):
    """A machine whose events name the plan epoch under which they arose."""

    def __init__(self, epoch: int = 0) -> None:
        super().__init__()
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        return self._epoch

    def _is_stale(self, event: EpochEventT) -> bool:
        return event.epoch != self._epoch
