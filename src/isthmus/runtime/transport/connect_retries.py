"""Tries connections again that fail for a temporary reason, such as a full waiting room."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import TypeVar

from isthmus.errors import PeerError

WAITS_S = (0.2, 0.5, 1.0, 2.0)
"""Between attempts; the last one again and again."""
Reached = TypeVar("Reached")


class Unreached(PeerError):
    """Nobody answered. Another attempt may do better."""


class HungUp(Unreached):
    """The other side closed the connection before it knew its caller, as a busy coordinator does."""


def until_reached(attempt: Callable[[], Reached], within_s: float, passing: type[Unreached] = HungUp) -> Reached:
    """What the first attempt returns that succeeds. Raises what the last one raised when the time is over, and at once
    whatever is not `passing`."""
    deadline_s = time.monotonic() + within_s
    for wait_s in chain(WAITS_S, repeat(WAITS_S[-1])):
        try:
            return attempt()
        except passing:
            if time.monotonic() + wait_s >= deadline_s:
                raise
        time.sleep(wait_s)
    raise AssertionError("waits do not end")
