"""Emulated executors: slower ones, ones whose speed changes from round to round, and times that are not steady."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from isthmus.rng import stream


class SpeedEmulation(msgspec.Struct, frozen=True, kw_only=True):
    """How executor number `executor` differs from this machine (Parrot, Section 5.1)."""

    executor: int = 0
    eta: float = 0.0
    """It sleeps eta T after training for T seconds of a core."""
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


class Pacer:
    """Makes training last as long as on the executor that is emulated.

    Seconds of a core are stretched, not those of a clock: a wait for a core that others have would be stretched with
    them, and an executor of factor 16 would lose sixteen times what the wait took. And as a sleeper is woken late where
    cores are busy, later by far than a small client trains, what it lost is taken from the next clients' sleep.
    """

    def __init__(
        self,
        lasts: Callable[[float, int], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        core: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`lasts(seconds, round)` is how long training of so many seconds of a core lasts."""
        self._lasts = lasts
        self._clock, self._core, self._sleep = clock, core, sleep
        self._round = 0
        self._began_s = self._core_began_s = self._behind_s = 0.0

    def open(self, round_: int) -> None:
        """A phase of this round begins; what is behind belongs to the phase before."""
        self._round, self._behind_s = round_, 0.0

    def begin(self) -> None:
        self._began_s, self._core_began_s = self._clock(), self._core()

    def end(self) -> float:
        """Sleep as long as is needed; returns the seconds since `begin`, as a clock sees them."""
        lasts_s = self._lasts(self._core() - self._core_began_s, self._round)
        seconds = self._clock() - self._began_s
        if (rest_s := lasts_s - seconds - self._behind_s) > 0:
            self._sleep(rest_s)
            seconds = self._clock() - self._began_s
        self._behind_s += seconds - lasts_s
        return seconds
