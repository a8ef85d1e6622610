"""Limits what one peer may cause: messages, and log lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage


class Rate(NamedTuple):
    """The most messages of one connection."""

    per_s: float  # in the long run
    burst: float  # at once


class RateLimit:
    """A token bucket."""

    def __init__(self, rate: Rate) -> None:
        self._per_s, self._burst = rate
        self._left = rate.burst
        self._spent_s = 0.0

    def spend(self, now_s: float) -> None:
        """One message at this time of a monotonic clock; PeerError when it is one too many."""
        gained = (now_s - self._spent_s) * self._per_s
        self._left = min(self._burst, self._left + gained) - 1
        self._spent_s = now_s
        if self._left < 0:
            raise PeerError(f"sent more than {self._per_s:g} messages a second")


def limited(rate: Rate, check: Callable[[AnyMessage], None]) -> Callable[[AnyMessage], None]:
    """Return a check of one connection's messages that also refuses (PeerError) those beyond the rate."""
    limit = RateLimit(rate)

    def both(message: AnyMessage) -> None:
        limit.spend(time.monotonic())
        check(message)

    return both


MOST_LINES = 10  # about one device in a window
WINDOW_S = 30.0


class LogLimiter:
    """Lines about devices. One that comes and goes, or sends nonsense, again and again gets so many of them, and then
    a count: what devices do must not fill a disk. Any thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[float, int]] = {}
        """The beginning of each device's window, and how many lines there were about it since then."""

    def about(self, device: str, text: str) -> None:
        self.look()
        with self._lock:
            began_s, lines = self._windows.get(device, (time.monotonic(), 0))
            self._windows[device] = (began_s, lines + 1)
        if lines < MOST_LINES:
            self._log(text)

    def look(self) -> None:
        """Tell the counts of windows that are over; to be called now and then."""
        now_s = time.monotonic()
        with self._lock:
            over = {d: lines for d, (began_s, lines) in self._windows.items() if now_s - began_s >= WINDOW_S}
            for device in over:
                del self._windows[device]
        for device, lines in over.items():
            if lines > MOST_LINES:
                self._log(f"{device}: {lines - MOST_LINES} more lines about it in {WINDOW_S:g} s")
