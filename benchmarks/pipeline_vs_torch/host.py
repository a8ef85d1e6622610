"""How busy this machine is with other things."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET_CORES = 0.3
LOOK_S = 3.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def wait_for_quiet(timeout_s: float) -> float:
    """Return when the machine is quiet, or the timeout is over; to be called while nothing of ours computes.

    The result is how many cores others used in the last `LOOK_S` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        start_s, before_s = time.monotonic(), _busy_s()
        time.sleep(LOOK_S)
        cores = (_busy_s() - before_s) / (time.monotonic() - start_s)
        if cores <= QUIET_CORES or time.monotonic() >= deadline_s:
            return cores


def _busy_s() -> float:
    """Seconds that all cores together have worked, or were taken by a hypervisor, since the machine started."""
    user, nice, system, _, _, interrupts, soft_interrupts, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + interrupts + soft_interrupts + steal) / _TICKS_PER_S
