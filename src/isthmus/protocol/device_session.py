"""A device's side of a run: which stage it has, and which states it keeps.

    idle ──assigned──► connecting ──weights, state──► starting ──► working
      ▲                    │                             │            │
      └── paused, or the stage cannot go on ─────────────┴────────────┘

Whatever the device had is closed before it gets something else. The state of a stage that is closed is kept, if it is
that of a whole step: another plan may go on from it.

A stage begins from parts of three kinds: those in the device's memory, those that other devices give, and the rest,
which come with `PlaceWeights`. What others give is kept as soon as it is here. So if a donor is lost in the middle, the
next plan asks for the rest alone. A device gives what is in its memory whatever its own stage does: nothing there is
changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Generic, Protocol, TypeVar

from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import Halt, Pause, PlaceWeights, RetireSnapshots, TakeState
from isthmus.session.program import OVER, OutOfPhase, Policy

Value = TypeVar("Value")
SessionOrder = Pause | PlaceWeights | TakeState | RetireSnapshots | Halt


class SessionPort(Protocol):
    """A session asks this of its device. A method may notify the session at once of the outcome."""

    def close_stage(self) -> None:
        """Close the stage and its links; say `kept` first, if its state is that of a whole step."""

    def connect(self) -> None:
        """Connect to the neighbours and read the data, then say `connected`; or `failed`."""

    def fetch(self, step: int, donors: Mapping[str, frozenset[str]]) -> None:
        """Get these parts of the state after `step` steps from other devices; say `fetched` of what has come, and
        `unfetched` of a donor that gives no more."""

    def missing(self, donor: str, parts: frozenset[str], reason: str) -> None:
        """Tell the coordinator that the donor does not give these parts."""

    def start(self, step: int, own: frozenset[str]) -> None:
        """Make the stage from the weights at hand and these parts of the device's memory, then say `started`."""

    def ready(self) -> None:
        """Tell the coordinator that the stage is at work."""

    def inventory(self) -> None:
        """Tell the coordinator what is in the session's memory."""

    def copied(self, step: int, of: str) -> None:
        """Tell the coordinator that parts of the state of another device's stage are here."""

    def leave(self) -> None:
        """The run is over."""


class DeviceSession(Policy[SessionPort], Generic[Value]):
    """The session of one worker, which sets `port`. `Value` is the device's type for a part of the state."""

    def __init__(self) -> None:
        super().__init__("idle")
        self.epoch = 0  # the epoch of the plan in force
        self.memory: StateInventory[Value] = StateInventory()
        self._step = 0
        self._connected = False
        self._placed: PlaceWeights | None = None
        self._donors: dict[str, frozenset[str]] = {}  # parts that are still to come, by who gives them
        self._taken: frozenset[str] = frozenset()  # all parts that others give, or gave
        self._lacked: frozenset[str] = frozenset()  # those of them that are not here yet

    # What the coordinator orders

    def ordered(self, order: SessionOrder) -> None:
        """Raises OutOfPhase for weights that no stage waits for."""
        match order:
            case PlaceWeights():
                if not self._is_late(order.epoch):
                    self._place(order)
            case _ if self.over:
                return
            case Pause(epoch=epoch):
                before, self.phase, self.epoch = self.phase, "idle", epoch
                self._close(before)
                self.port.inventory()
            case TakeState():
                if not self._is_late(order.epoch):
                    self._check(type(order).__name__, "idle", "connecting")
                    self._take(order.donors)
            case RetireSnapshots(step=step):
                self.memory.retire(step)
            case Halt():
                self.phase = OVER
                self.port.leave()

    def assigned(self, epoch: int, step: int) -> None:
        """A stage of this epoch, which begins from the state after `step` steps."""
        if self.over:
            return
        before, self.phase = self.phase, "connecting"
        self.epoch, self._step = epoch, step
        self._connected, self._placed = False, None
        self._donors, self._taken, self._lacked = {}, frozenset(), frozenset()
        self._close(before)
        self.port.connect()

    # What the device says

    def connected(self, epoch: int) -> None:
        """There are links to the stage's neighbours, and the data are here."""
        if self._is_late(epoch):
            return
        self._check("connected", "idle", "connecting")
        self._connected = True
        self._start()

    def fetched(self, epoch: int, donor: str, values: Mapping[str, Value]) -> None:
        """Another device has given these parts of the state that the stage begins from."""
        if self._is_late(epoch) or self.phase != "connecting":
            return
        self.memory.keep(epoch, self._step, values)
        self._donors[donor] = self._donors.get(donor, frozenset()) - values.keys()
        self._lacked -= values.keys()
        self._start()

    def unfetched(self, epoch: int, donor: str, reason: str) -> None:
        """The donor gives no more."""
        if self._is_late(epoch) or self.phase != "connecting":
            return
        if parts := self._donors.pop(donor, None):
            self.port.missing(donor, parts, reason)

    def started(self, epoch: int) -> None:
        if self._is_late(epoch):
            return
        self._check("started", "idle", "starting")
        if self.phase == "starting":  # else it was closed meanwhile
            self.phase = "working"
            self.port.ready()

    def failed(self, epoch: int) -> None:
        """The stage cannot go on, or not begin. The coordinator knows why."""
        if not self._is_late(epoch):
            before, self.phase = self.phase, "idle"
            self._close(before)

    def kept(self, epoch: int, step: int, values: Mapping[str, Value], of: str = "") -> None:
        """Parts of the state after `step` steps are in memory: of this device's stage, or of another's (`of`). The own
        state of an epoch that is over may be what the next one begins from."""
        if self._is_late(epoch) if of else self.over:
            return
        self.memory.keep(epoch, step, values)
        if of:
            self.port.copied(step, of)

    def _is_late(self, epoch: int) -> bool:
        self.stale += epoch != self.epoch
        return epoch != self.epoch or self.over

    def _check(self, what: str, *phases: str) -> None:
        if self.phase not in phases:
            raise OutOfPhase(f"{what} came in phase {self.phase!r}")

    def _place(self, order: PlaceWeights) -> None:
        self._check(type(order).__name__, "idle", "connecting")
        self._placed = order
        self._take(order.donors)
        self._start()

    def _take(self, donors: Mapping[str, frozenset[str]]) -> None:
        if self.phase != "connecting" or not donors:  # it may have failed meanwhile
            return
        for donor, parts in donors.items():
            self._donors[donor] = self._donors.get(donor, frozenset()) | parts
        parts = frozenset[str]().union(*donors.values())
        self._taken, self._lacked = self._taken | parts, self._lacked | parts
        self.port.fetch(self._step, donors)

    def _close(self, before: str) -> None:
        if before != "idle":
            self.port.close_stage()

    def _start(self) -> None:
        if self.phase == "connecting" and self._connected and self._placed is not None and not self._lacked:
            self.phase = "starting"
            self.memory.begin(self._step)
            self.port.start(self._step, self._placed.own | self._taken)


class StateInventory(Generic[Value]):
    """Values of parts by plan epoch and step. A value is whatever the driver keeps for a part.

    One thread changes it; others may look meanwhile, as nothing is changed in place.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], dict[str, Value]] = {}

    def keep(self, epoch: int, step: int, values: Mapping[str, Value]) -> None:
        """Parts of the state after `step` steps, as this epoch made it, besides those that are here of it already."""
        self._kept = {**self._kept, (epoch, step): {**self._kept.get((epoch, step), {}), **values}}

    def holdings(self) -> tuple[StateHolding, ...]:
        return tuple(StateHolding(epoch=e, step=s, parts=frozenset(kept)) for (e, s), kept in self._kept.items())

    def values(self, step: int, parts: Set[str]) -> dict[str, Value]:
        """The parts that are here of the state after `step`; of two epochs' the later one's."""
        found: dict[str, Value] = {}
        for (_, at), kept in sorted(self._kept.items(), key=lambda entry: entry[0]):
            if at == step:
                found |= {part: value for part, value in kept.items() if part in parts}
        return found

    def begin(self, step: int) -> None:
        """An epoch begins from the state after `step`: what lies beyond is of a line that ended."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] <= step}

    def retire(self, step: int) -> None:
        """There is a whole snapshot of this step: forget those before."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] >= step}
