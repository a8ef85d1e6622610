"""Tests of times, on machines that do other work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import pytest

PRESSURE = Path("/proc/pressure/cpu")
TRIES = 5
BUSY_SHARE = 0.05
"""Of the time: for so long a thread that could run waited for a core."""

P = ParamSpec("P")


def when_quiet(test: Callable[P, None]) -> Callable[P, None]:
    """Try a test again if threads waited for a core while it failed. If they always did, skip it: no time is known."""

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(TRIES):
            waited_s, began_s = core_waits_s(), time.monotonic()
            try:
                return test(*args, **kwargs)
            except Exception:
                share = (core_waits_s() - waited_s) / (time.monotonic() - began_s)
                if share < BUSY_SHARE:
                    raise
        pytest.skip("other work on this machine leaves no quiet moment to measure a time")

    return tried


def core_waits_s() -> float:
    """Seconds since boot in which some thread waited for a core; 0 where the kernel does not count them."""
    if not PRESSURE.exists():
        return 0.0
    some = PRESSURE.read_text().splitlines()[0]
    return int(some.split("total=")[1]) / 1e6
