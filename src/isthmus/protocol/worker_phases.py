"""The phases of a worker, and which event leads from one to another."""

from __future__ import annotations

from typing import Literal

import msgspec

from isthmus.protocol.events import (
    Arrived,
    Collected,
    Computed,
    Filled,
    Halted,
    Opened,
    PartsArrived,
    Saved,
    SnapshotKept,
    Taken,
    Updated,
)
from isthmus.protocol.machine import Transitions

Phase = Literal[
    "idle",
    "tasklets",
    "gathering",
    "filling",
    "averaging",
    "taking",
    "collecting",
    "clipping",
    "updating",
    "settling",
    "saving",
    "keeping",
    "halted",
]


class WorkerStatistics(msgspec.Struct, frozen=True):
    phase: Phase
    item: int
    """The item in work, or the last one finished."""
    forwards: int
    backwards: int
    stale: int
    """Events of another plan epoch, dropped."""


_NEXT = "idle tasklets gathering filling collecting settling saving keeping"
"""After the end of an item: its successor may be here already, with all that its first tasklets need."""
_GATHERED = "gathering filling collecting"

WORKER = Transitions(
    "idle",
    "halted",
    {
        "idle": {Opened: _NEXT, Arrived: "idle", PartsArrived: "idle", Halted: "halted"},
        "tasklets": {
            Opened: "tasklets",
            Arrived: f"tasklets {_GATHERED}",
            PartsArrived: "tasklets",
            Computed: f"{_NEXT}",
            Halted: "halted",
        },
        "gathering": {Opened: "gathering", Arrived: _GATHERED, PartsArrived: "gathering", Halted: "halted"},
        "filling": {
            Opened: "filling",
            Arrived: "filling",
            PartsArrived: "filling",
            Filled: f"averaging taking {_NEXT}",
            Halted: "halted",
        },
        "averaging": {
            Opened: "averaging",
            Arrived: "averaging",
            PartsArrived: "averaging taking",
            Halted: "halted",
        },
        "taking": {
            Opened: "taking",
            Arrived: "taking",
            PartsArrived: "taking",
            Taken: _NEXT,
            Halted: "halted",
        },
        "collecting": {
            Opened: "collecting",
            Arrived: "collecting",
            PartsArrived: "collecting",
            Collected: "clipping updating",
            Halted: "halted",
        },
        "clipping": {
            Opened: "clipping",
            Arrived: "clipping updating",
            PartsArrived: "clipping",
            Halted: "halted",
        },
        "updating": {
            Opened: "updating",
            Arrived: "updating",
            PartsArrived: "updating",
            Updated: f"averaging taking {_NEXT}",
            Halted: "halted",
        },
        "settling": {
            Opened: "settling",
            Arrived: "settling",
            PartsArrived: "settling saving keeping",
            Halted: "halted",
        },
        "saving": {Opened: "saving", Arrived: "saving", PartsArrived: "saving", Saved: _NEXT, Halted: "halted"},
        "keeping": {
            Opened: "keeping",
            Arrived: "keeping",
            PartsArrived: "keeping",
            SnapshotKept: _NEXT,
            Halted: "halted",
        },
    },
)
