"""Emulated executors: slower ones, ones whose speed changes from round to round, and times that are not steady."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from isthmus.streams import stream


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """How executor number `executor` differs from this machine (Parrot, Section 5.1)."""

    executor: int = 0
    eta: float = 0.0
    """It sleeps eta T after training for T."""
    unstable: bool = False
    """In round r of R it takes 1 + cos(3.14 r / R + k) times T longer."""
    noise: float = 0.0
    """Sigma of a log-normal factor of mean 1, of each client by itself."""
    rounds: int = 1
    seed: int = 0

    def factor(self, round_: int) -> float:
        """Expected time over that of this machine."""
        wave = 1 + math.cos(3.14 * round_ / max(1, self.rounds) + self.executor) if self.unstable else 0.0
        return 1 + self.eta + wave

    def clock(self) -> Callable[[float, int], float]:
        """(seconds, round) -> how long training that took `seconds` lasts; never less, as it cannot be undone."""
        draws, sigma = stream(self.seed, "pace", client=self.executor), self.noise

        def lasts(seconds: float, round_: int) -> float:
            jitter = float(draws.lognormal(-(sigma**2) / 2, sigma)) if sigma else 1.0
            return seconds * max(1.0, self.factor(round_) * jitter)

        return lasts
