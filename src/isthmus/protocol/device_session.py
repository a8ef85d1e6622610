"""A device's side of a run: which stage it has, and which states it keeps.

    idle ──assigned──► connecting ──weights──► starting ──► working
      ▲                    │                      │            │
      └── paused, or the stage cannot go on ──────┴────────────┘

Whatever the device had is closed before it gets something else. The state of a stage that is closed is kept, if it is
that of a whole step: another plan may go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Generic, Literal, TypeVar

import msgspec

from isthmus.protocol.machine import EpochMachine, Transitions
from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import (
    DeviceReady,
    FetchState,
    Halt,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    SnapshotCopied,
)
from isthmus.session.program import Event

Value = TypeVar("Value")

# From the coordinator, besides the bodies in `run_messages`


class StageAssigned(Event, frozen=True, kw_only=True):
    """A stage of this epoch, which begins from the state after `step` steps."""

    step: int


# From the device itself


class Connected(Event, frozen=True, kw_only=True):
    """There are links to the stage's neighbours, and the data are here."""


class StageStarted(Event, frozen=True, kw_only=True):
    pass


class StageFailed(Event, frozen=True, kw_only=True):
    """The stage cannot go on, or not begin. The coordinator knows why."""


class StateKept(Event, Generic[Value], frozen=True, kw_only=True):
    """Parts of the state after `step` steps are in memory: of this device's stage, or of another's (`of`)."""

    step: int
    values: Mapping[str, Value]
    of: str = ""


SessionEvent = (
    Pause
    | StageAssigned
    | PlaceWeights
    | FetchState
    | RetireSnapshots
    | Halt
    | Connected
    | StageStarted
    | StageFailed
    | StateKept[Value]
)


# What the device is to do. `DeviceReady` and `SnapshotCopied` go to the coordinator


class CloseStage(msgspec.Struct, frozen=True):
    """Close the stage and its links; say `StateKept` first, if its state is that of a whole step."""


class Connect(msgspec.Struct, frozen=True):
    """Connect to the neighbours and read the data, then say `Connected`; or `StageFailed`."""


class StartStage(msgspec.Struct, frozen=True):
    """Make the stage from the weights at hand and these parts of the device's memory, then say `StageStarted`."""

    step: int
    own: frozenset[str]


class TellInventory(msgspec.Struct, frozen=True):
    """Say what is in the session's memory, once the stage is closed."""


class GiveState(msgspec.Struct, Generic[Value], frozen=True):
    epoch: int
    """Of who asked: of a device that has just joined, another one than its own."""
    values: Mapping[str, Value]


class LeaveRun(msgspec.Struct, frozen=True):
    pass


SessionInstruction = (
    CloseStage | Connect | StartStage | TellInventory | DeviceReady | SnapshotCopied | GiveState[Value] | LeaveRun
)

Phase = Literal["idle", "connecting", "starting", "working", "over"]

SESSION = Transitions(
    "idle",
    "over",
    {
        "idle": {
            Pause: "idle",
            StageAssigned: "connecting",
            Connected: "idle",
            StageStarted: "idle",
            PlaceWeights: "idle",
            FetchState: "idle",
            RetireSnapshots: "idle",
            Halt: "over",
            StageFailed: "idle",
            StateKept: "idle",
        },
        "connecting": {
            Pause: "idle",
            StageAssigned: "connecting",
            Connected: "connecting starting",
            PlaceWeights: "connecting starting",
            FetchState: "connecting",
            RetireSnapshots: "connecting",
            Halt: "over",
            StageFailed: "idle",
            StateKept: "connecting",
        },
        "starting": {
            Pause: "idle",
            StageAssigned: "connecting",
            StageStarted: "working",
            FetchState: "starting",
            RetireSnapshots: "starting",
            Halt: "over",
            StageFailed: "idle",
            StateKept: "starting",
        },
        "working": {
            Pause: "idle",
            StageAssigned: "connecting",
            FetchState: "working",
            RetireSnapshots: "working",
            Halt: "over",
            StageFailed: "idle",
            StateKept: "working",
        },
    },
)


class DeviceSession(EpochMachine[Phase, SessionEvent[Value], SessionInstruction[Value]], Generic[Value]):
    """Of one worker. A value is whatever the host keeps for a part of the state."""

    transitions = SESSION

    def __init__(self) -> None:
        super().__init__()
        self.memory: StateInventory[Value] = StateInventory()
        self._step = 0
        self._connected = False
        self._placed: PlaceWeights | None = None

    def _is_stale(self, event: SessionEvent[Value]) -> bool:
        """Orders begin epochs, and the own state of an epoch that is over may be what the next one begins from."""
        if isinstance(event, Pause | StageAssigned | FetchState | RetireSnapshots | Halt):
            return False
        return event.epoch != self._epoch and not (isinstance(event, StateKept) and not event.of)

    def _take(self, event: SessionEvent[Value]) -> list[SessionInstruction[Value]]:
        match event:
            case Pause(epoch=epoch):
                out = self._close()
                self._epoch = epoch
                return [*out, TellInventory()]
            case StageAssigned(epoch=epoch, step=step):
                out = self._close()
                self._phase, self._epoch, self._step = "connecting", epoch, step
                self._connected, self._placed = False, None
                return [*out, Connect()]
            case Connected():
                self._connected = True
                return self._start() if self._phase == "connecting" else []
            case PlaceWeights():
                self._placed = event
                return self._start() if self._phase == "connecting" else []
            case StageStarted():
                if self._phase != "starting":  # it was closed meanwhile
                    return []
                self._phase = "working"
                return [DeviceReady(epoch=self._epoch)]
            case StageFailed():
                return self._close()
            case StateKept(epoch=epoch, step=step, values=values, of=of):
                self.memory.keep(epoch, step, values)
                return [SnapshotCopied(of=of, step=step, epoch=self._epoch)] if of else []
            case FetchState(epoch=epoch, step=step, parts=parts):
                return [GiveState(epoch, self.memory.values(step, parts))]
            case RetireSnapshots(step=step):
                self.memory.retire(step)
                return []
            case Halt():
                self._phase = "over"
                return [LeaveRun()]

    def _close(self) -> list[SessionInstruction[Value]]:
        before, self._phase = self._phase, "idle"
        return [] if before == "idle" else [CloseStage()]

    def _start(self) -> list[SessionInstruction[Value]]:
        if not self._connected or self._placed is None:
            return []
        self._phase = "starting"
        self.memory.begin(self._step)
        return [StartStage(self._step, self._placed.own)]


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
