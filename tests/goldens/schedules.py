"""How each of the 2,200 fault schedules ends, by block of 220."""

from __future__ import annotations

import hashlib

from tests.faults.schedule import drawn
from tests.faults.simulated import Simulated

BLOCKS, EACH = 10, 220


def block(number: int) -> str:
    """Hash of outcome, reason, steps, end and recoveries of each schedule."""
    ends: list[str] = []
    for seed in range(number * EACH, (number + 1) * EACH):
        run = Simulated(drawn(seed))
        ends.append(f"{seed} {run.run()} {run.clock.now_s!r} {run.recoveries} {run.state_received} {run.recalls}")
    return hashlib.sha256("\n".join(ends).encode()).hexdigest()
