"""Where a run's coordinator is, and what it counts."""

from __future__ import annotations

from typing import Literal

import msgspec

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
