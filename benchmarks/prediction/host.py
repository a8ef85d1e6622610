"""How busy this host is with other things: a run that shared its cores measured them, not us."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _busy_s() -> float:
    """Seconds that all cores worked for processes since the start, and those that a hypervisor took."""
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / _TICKS_PER_S


def _own_s() -> float:
    """CPU seconds of this process, of the processes that it has waited for, and of its children."""
    waited = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in waited) + sum(_process_s(pid) for pid in _children())


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for found in lists for pid in found.read_text().split()]


def _process_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class Load:
    """Cores that others have used since this was made."""

    def __init__(self) -> None:
        self._start_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    @property
    def cores(self) -> float:
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / max(1e-3, time.monotonic() - self._start_s))


def wait_for_quiet(cores: float, timeout_s: float) -> None:
    """Until others use at most so many cores for three seconds, or the timeout is over."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        load = Load()
        time.sleep(3.0)
        if load.cores <= cores:
            return
