"""Waiting for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S, SHARE, LONGEST_S = 0.02, 0.2, 0.2


def wait_for(condition: Callable[[], object], within_s: float, still: Callable[[], None] = lambda: None) -> None:
    """Until the condition holds. Looking, which may go through all processes or ask a server, takes no more than a
    share of the time: others need the processor for what is waited for. `still` fails where it cannot come any more."""
    deadline_s = time.monotonic() + within_s
    while True:
        start_s = time.thread_time()
        if condition():
            return
        still()
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(min(LONGEST_S, max(LOOK_S, (time.thread_time() - start_s) / SHARE)))
