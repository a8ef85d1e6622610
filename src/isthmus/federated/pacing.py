"""Emulated executors: slower ones, and ones whose speed changes from round to round (Parrot, Section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable


def slow_down(eta: float, unstable: bool, executor: int, rounds: int) -> Callable[[float, int], float]:
    """(seconds, round) -> how long training that took `seconds` lasts on executor number `executor`.

    A slow one sleeps eta T after training for T; an unstable one lasts (1 + cos(3.14 r / R + k)) times as long, but
    never less than T, as a real pass cannot be undone.
    """

    def lasts(seconds: float, round_: int) -> float:
        factor = 1 + eta
        if unstable:
            factor += 1 + math.cos(3.14 * round_ / max(1, rounds) + executor)
        return seconds * factor

    return lasts
