"""The phases of the two federated machines, and which event leads from one to another."""

from __future__ import annotations

from typing import Literal

from isthmus.protocol.federated_events import (
    ExecutorLost,
    PhaseUnderWay,
    RoundPlanned,
    RunInterrupted,
    TasksTrained,
    Tick,
    Unmasked,
)
from isthmus.protocol.federated_messages import (
    ExecutorDrained,
    ExecutorJoined,
    PhaseClosed,
    PhaseDropped,
    PhaseOpened,
    SumsSent,
    TasksGranted,
    TasksRecalled,
    TasksReturned,
    UpdateRefused,
)
from isthmus.protocol.machine import Transitions
from isthmus.protocol.run_messages import Halt

CoordinatorPhase = Literal["joining", "planning", "running", "unmasking", "done"]
ExecutorPhase = Literal["idle", "training", "drained", "stopped"]

_BEGIN = "joining planning running done"
"""Where an executor that came may lead to: a run that is resumed after its last round has nothing to do."""
_OVER = "running planning joining done"
"""Where the end of a round leads to: to the next round, to waiting for executors, to the end."""
_ROUND_OVER = f"{_OVER} unmasking"
"""Where what may end a round leads to: masked sums are unmasked first."""

COORDINATOR = Transitions(
    "joining",
    "done",
    {
        "joining": {
            ExecutorJoined: _BEGIN,
            ExecutorLost: "joining done",
            Tick: _BEGIN,
            RunInterrupted: "done",
            PhaseUnderWay: "joining",
        },
        "planning": {RoundPlanned: _OVER},
        "running": {
            ExecutorJoined: "running",
            ExecutorDrained: "running",
            TasksReturned: _ROUND_OVER,
            SumsSent: _ROUND_OVER,
            ExecutorLost: _ROUND_OVER,
            Tick: _ROUND_OVER,
            RunInterrupted: "done",
            PhaseUnderWay: "running",
            RoundPlanned: "running",
        },
        "unmasking": {
            Unmasked: _OVER,
            ExecutorJoined: "unmasking",
            ExecutorLost: "unmasking",
            Tick: "unmasking",
            RunInterrupted: "done",
            PhaseUnderWay: "unmasking",
        },
    },
)

_NEXT = "training drained idle"
"""The next client; none is left, and there may be more; none is left, and the sums are sent."""

EXECUTOR = Transitions(
    "idle",
    "stopped",
    {
        "idle": {
            PhaseOpened: _NEXT,
            TasksGranted: _NEXT,
            TasksRecalled: "idle",
            PhaseClosed: "idle",
            PhaseDropped: "idle",
            UpdateRefused: "idle",
            Halt: "stopped",
        },
        "training": {
            PhaseOpened: _NEXT,
            TasksGranted: "training",
            TasksRecalled: "training",
            PhaseClosed: "training",
            PhaseDropped: "idle",
            UpdateRefused: "training",
            TasksTrained: _NEXT,
            Halt: "stopped",
        },
        "drained": {
            PhaseOpened: _NEXT,
            TasksGranted: _NEXT,
            TasksRecalled: "drained",
            PhaseClosed: "idle",
            PhaseDropped: "idle",
            UpdateRefused: "drained",
            Halt: "stopped",
        },
    },
)
