"""What a simulation assumes besides the plan, the fleet and the run's length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.errors import UserError
from isthmus.simulator.faults import Fault

Timed = Literal["F", "B", "E", "update"]


def _check(field: str, number: float) -> None:
    if not 0 <= number < math.inf:
        raise UserError(f"{field}: got {number}, expected a finite number of at least 0")


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that FLOPs and bytes do not explain. Zero unless calibrated."""

    tasklet_s: float = 0.0
    """Added to each forward, backward and evaluation."""
    message_s: float = 0.0
    """Added to the time that each message occupies its link."""
    handover_s: float = 0.0
    """From the end of a tasklet to the first byte on a free link, and again from the last byte to the tasklet that
    waited for it: a sleeping lane wakes up. It occupies neither the lane nor the link."""

    def __post_init__(self) -> None:
        _check("overheads.tasklet_s", self.tasklet_s)
        _check("overheads.message_s", self.message_s)
        _check("overheads.handover_s", self.handover_s)


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a change of plan takes, besides what links and time limits say."""

    plan_s: float = 1.0
    """To make a plan."""
    process_s: float = 3.0
    """To start a device's process."""
    stage_s: float = 0.2
    """To make a stage from its weights."""
    redial_s: float = 1.0
    """Until a device whose connection was closed tries again."""
    control_bytes_per_s: float = math.inf
    """Of the way between a device and the coordinator, which carries weights."""
    timeout_s: float = 60.0
    """Silence after which a connection is given up."""
    start_s: float = 60.0
    """How long the coordinator waits for a device to join."""

    def __post_init__(self) -> None:
        for name in ("plan_s", "process_s", "stage_s", "redial_s", "timeout_s", "start_s"):
            _check(f"recovery.{name}", getattr(self, name))
        if not self.control_bytes_per_s > 0:
            raise UserError(f"recovery.control_bytes_per_s: got {self.control_bytes_per_s}, expected more than 0")


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a simulation besides the plan, its fleet and the number of steps."""

    clips: bool = False
    """Gradient norms are exchanged before each update."""
    counts: bool = False
    """The loss is a sum over a count, which the loss's stage sends to the others."""
    eval_edges: Mapping[tuple[int, int], int] | None = None
    """Bytes per micro-batch that an evaluation sends from stage to stage; None: as in training."""

    durations: Mapping[tuple[int, Timed], float] = {}
    """Measured seconds by (stage, work), stages counted replica after replica, in place
    of what the FLOPs say. An evaluation falls back to the forward."""
    overheads: Overheads = Overheads()
    update_s: float = 0.0
    save_s: float = 0.0
    header_bytes: int = 0
    """Per message, on the wire only."""
    control_latency_s: float = 0.0
    """Of each message between a device and the coordinator."""

    jitter: float = 0.0
    """Sigma of the log-normal factors on all durations and transfers; 0 for none."""
    seed: int = 0
    """Of the jitter, and of which comes first among simultaneous events."""
    faults: tuple[Fault, ...] = ()
    recovery: RecoveryTimes = RecoveryTimes()
    run: str = "simulation"
    """The trace's name."""

    def __post_init__(self) -> None:
        for name in ("update_s", "save_s", "header_bytes", "control_latency_s", "jitter"):
            _check(name, getattr(self, name))
        for (stage, work), seconds in self.durations.items():
            _check(f"durations: stage {stage}, {work}", seconds)
