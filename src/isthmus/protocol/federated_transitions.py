"""The phases of the coordinator of rounds, and which event leads from one to another."""

from __future__ import annotations

from typing import Literal

from isthmus.protocol.federated_events import (
    ExecutorLost,
    PhaseUnderWay,
    RoundPlanned,
    RunInterrupted,
    Tick,
    Unmasked,
)
from isthmus.protocol.federated_messages import (
    ExecutorDrained,
    ExecutorJoined,
    SumsSent,
    TasksReturned,
)
from isthmus.protocol.machine import Transitions

CoordinatorPhase = Literal["joining", "planning", "running", "unmasking", "done"]

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
