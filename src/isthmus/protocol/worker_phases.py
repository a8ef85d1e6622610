"""The phases of a worker, and which event leads from one to another."""

from __future__ import annotations

from typing import Literal

import msgspec

from isthmus.protocol.events import (
    Collected,
    Computed,
    Filled,
    Saved,
    SnapshotKept,
    Taken,
    Updated,
)
from isthmus.protocol.machine import Transitions
from isthmus.protocol.run_messages import Arrived, Halt, OpenItem, PartsArrived

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
"""After the end of an item: its successor may be here already, with all that its first tasklets need. A tasklet of the
next step may end in every phase that waits (`delayed`), and finds what the phase waited for."""
_GATHERED = "gathering filling collecting"

WORKER = Transitions(
    "idle",
    "halted",
    {
        "idle": {OpenItem: _NEXT, Arrived: "idle", PartsArrived: "idle", Halt: "halted"},
        "tasklets": {
            OpenItem: "tasklets",
            Arrived: f"tasklets {_GATHERED}",
            PartsArrived: "tasklets",
            Computed: f"{_NEXT}",
            Halt: "halted",
        },
        "gathering": {
            OpenItem: "gathering",
            Arrived: _GATHERED,
            PartsArrived: "gathering",
            Computed: _GATHERED,
            Halt: "halted",
        },
        "filling": {
            OpenItem: "filling",
            Arrived: "filling",
            PartsArrived: "filling",
            Filled: f"averaging taking {_NEXT}",
            Halt: "halted",
        },
        "averaging": {
            OpenItem: "averaging",
            Arrived: "averaging",
            PartsArrived: "averaging taking",
            Computed: "averaging taking",
            Halt: "halted",
        },
        "taking": {
            OpenItem: "taking",
            Arrived: "taking",
            PartsArrived: "taking",
            Taken: _NEXT,
            Halt: "halted",
        },
        "collecting": {
            OpenItem: "collecting",
            Arrived: "collecting",
            PartsArrived: "collecting",
            Collected: "clipping updating",
            Halt: "halted",
        },
        "clipping": {
            OpenItem: "clipping",
            Arrived: "clipping updating",
            PartsArrived: "clipping",
            Computed: "clipping updating",
            Halt: "halted",
        },
        "updating": {
            OpenItem: "updating",
            Arrived: "updating",
            PartsArrived: "updating",
            Updated: f"averaging taking {_NEXT}",
            Halt: "halted",
        },
        "settling": {
            OpenItem: "settling",
            Arrived: "settling",
            PartsArrived: "settling saving keeping",
            Computed: "settling saving keeping",
            Halt: "halted",
        },
        "saving": {OpenItem: "saving", Arrived: "saving", PartsArrived: "saving", Saved: _NEXT, Halt: "halted"},
        "keeping": {
            OpenItem: "keeping",
            Arrived: "keeping",
            PartsArrived: "keeping",
            SnapshotKept: _NEXT,
            Halt: "halted",
        },
    },
)
