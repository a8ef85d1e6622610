"""The phases of a run's coordinator, and which event leads from one to another."""

from __future__ import annotations

from typing import Literal

import msgspec

from isthmus.protocol.coordinator_events import (
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    DeviceOffered,
    DevicesQueued,
    FleetChanged,
    NoPlan,
    PlanMade,
    StopRequested,
)
from isthmus.protocol.machine import Transitions
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReady,
    Inventory,
    ItemReported,
    SnapshotCopied,
    StateFetched,
    StateReceived,
    TransferEnded,
)

Phase = Literal[
    "joining", "holding", "recalling", "planning", "fetching", "placing", "running", "settling", "closing", "done"
]


class CoordinatorStatistics(msgspec.Struct, frozen=True):
    phase: Phase
    finished: int
    """Items that every device has reported."""
    leased: int
    stale: int
    epoch: int
    recovery_point: int
    """The run goes on from this step at least, if any one device is lost now."""


_PLAN_AGAIN = "joining holding planning recalling done"
"""Where a lost device leads to: the others are asked what they hold, or, where nobody is left, waited for."""
_BEGIN = "joining fetching placing holding"
"""Where a plan leads to, by who of its devices is here, and what they hold."""

COORDINATOR = Transitions(
    "joining",
    "done",
    {
        "joining": {
            DeviceJoined: _BEGIN,
            DeviceFailed: "joining",
            DeviceLost: _PLAN_AGAIN,
            StopRequested: "joining done",
            PlanMade: "joining",
            NoPlan: "joining",
            DeviceOffered: "joining",
            DeviceLeaving: "joining",
            DevicesQueued: "joining",
            FleetChanged: "joining",
        },
        "fetching": {
            DeviceJoined: "fetching",
            StateFetched: "fetching placing",
            DeviceFailed: "fetching",
            DeviceLost: f"fetching {_PLAN_AGAIN}",
            StopRequested: "fetching done",
            PlanMade: "fetching",
            NoPlan: "fetching",
            DeviceOffered: "fetching",
            DeviceLeaving: "fetching",
            DevicesQueued: "fetching",
            FleetChanged: "fetching",
        },
        "placing": {
            DeviceJoined: "placing",
            DeviceReady: "placing running closing done",
            DeviceFailed: "holding done",
            DeviceLost: f"placing {_PLAN_AGAIN}",
            StopRequested: "placing done",
            PlanMade: "placing",
            NoPlan: "placing",
            DeviceOffered: "placing",
            DeviceLeaving: "placing",
            DevicesQueued: "placing",
            FleetChanged: "placing",
        },
        "running": {
            DeviceJoined: "running settling holding done",
            ItemReported: "running done",
            DeviceFailed: "holding done",
            DeviceLost: f"running {_PLAN_AGAIN}",
            StopRequested: "running closing done",
            PlanMade: "running settling holding done",
            NoPlan: "running",
            SnapshotCopied: "running",
            StateReceived: "running settling holding done",
            TransferEnded: "running settling holding done",
            DeviceOffered: "running",
            DeviceLeaving: "running",
            DevicesQueued: "running",
            FleetChanged: "running",
        },
        "settling": {
            DeviceJoined: "settling",
            ItemReported: "settling holding done",
            DeviceFailed: "holding done",
            DeviceLost: f"settling {_PLAN_AGAIN}",
            StopRequested: "settling closing done",
            PlanMade: "settling",
            NoPlan: "settling",
            SnapshotCopied: "settling",
            StateReceived: "settling holding done",
            TransferEnded: "settling holding done",
            DeviceOffered: "settling",
            DeviceLeaving: "settling",
            DevicesQueued: "settling",
            FleetChanged: "settling",
        },
        "closing": {
            DeviceJoined: "closing",
            ItemReported: "closing done",
            DeviceFailed: "holding done",
            DeviceLost: f"closing {_PLAN_AGAIN}",
            StopRequested: "closing",
            PlanMade: "closing",
            NoPlan: "closing",
            SnapshotCopied: "closing",
            StateReceived: "closing",
            TransferEnded: "closing",
            DeviceOffered: "closing",
            DeviceLeaving: "closing",
            DevicesQueued: "closing",
            FleetChanged: "closing",
        },
        "holding": {
            DeviceJoined: f"{_BEGIN} planning recalling done",
            Inventory: f"{_BEGIN} planning recalling done",
            DeviceFailed: "holding",
            DeviceLost: _PLAN_AGAIN,
            StopRequested: "holding",
            DeviceOffered: "holding",
            DeviceLeaving: "holding",
            DevicesQueued: "holding",
            FleetChanged: "holding",
        },
        "planning": {
            DeviceJoined: "planning",
            DeviceFailed: "planning",
            DeviceLost: _PLAN_AGAIN,
            StopRequested: "planning",
            PlanMade: _BEGIN,
            NoPlan: "planning recalling done",
            DeviceOffered: "planning",
            DeviceLeaving: "planning",
            DevicesQueued: "planning",
            FleetChanged: "planning",
        },
        "recalling": {
            DeviceJoined: "planning recalling done",
            DeviceFailed: "recalling",
            DeviceLost: _PLAN_AGAIN,
            StopRequested: "recalling done",
            PlanMade: "recalling",
            NoPlan: "recalling",
            DeviceOffered: "planning recalling done",
            DeviceLeaving: "recalling",
            DevicesQueued: "planning recalling done",
            FleetChanged: "recalling",
        },
    },
)
