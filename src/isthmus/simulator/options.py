"""What a simulation assumes besides the plan, the fleet and the run's length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.errors import UserError

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


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device goes away. What it had put on the wire still arrives."""

    device: str
    time_s: float
    noticed_after_s: float = 0.0
    """Until the coordinator knows, besides the control latency: the runtime's missed heartbeats."""

    def __post_init__(self) -> None:
        _check("fault: time_s", self.time_s)
        _check("fault: noticed_after_s", self.noticed_after_s)


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
    run: str = "simulation"
    """The trace's name."""

    def __post_init__(self) -> None:
        for name in ("update_s", "save_s", "header_bytes", "control_latency_s", "jitter"):
            _check(name, getattr(self, name))
        for (stage, work), seconds in self.durations.items():
            _check(f"durations: stage {stage}, {work}", seconds)
