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
    eta: float = 0.0  # it sleeps eta T after training for T seconds of a core
    unstable: bool = False  # in round r of R it takes 1 + cos(3.14 r / R + k) times T longer
    noise: float = 0.0  # sigma of a log-normal factor of mean 1, of each client by itself
    rounds: int = 1
    seed: int = 0

    def factor(self, round_: int) -> float:
        """Expected time over that of this machine."""
        wave = 1 + math.cos(3.14 * round_ / max(1, self.rounds) + self.executor) if self.unstable else 0.0
        return 1 + self.eta + wave

    def factors(self) -> Callable[[int], float]:
        """Round -> the factor of the next client's time, drawn with its noise."""
        draws, sigma = stream(self.seed, "pace", client=self.executor), self.noise

        def drawn(round_: int) -> float:
            return self.factor(round_) * (float(draws.lognormal(-(sigma**2) / 2, sigma)) if sigma else 1.0)

        return drawn

    def clock(self) -> Callable[[float, int], float]:
        """(seconds, round) -> how long training that took `seconds` lasts; never less, as it cannot be undone."""
        drawn = self.factors()
        return lambda seconds, round_: seconds * max(1.0, drawn(round_))


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
        self._round = self._number = 0
        self._began_s = self._core_began_s = self._behind_s = 0.0

    def open(self, round_: int, number: int = 0) -> None:
        """Pass `number` of this round begins; what is behind belongs to the one before."""
        self._round, self._number, self._behind_s = round_, number, 0.0

    def begin(self) -> None:
        self._began_s, self._core_began_s = self._clock(), self._core()

    def end(self, samples: int = 0) -> float:
        """Sleep as long as is needed after training on so many samples; returns the seconds since `begin`, as a clock
        sees them."""
        return self._sleep_until(self._lasts(self._core() - self._core_began_s, self._round))

    def received(self, size_bytes: Callable[[], int]) -> None:
        """The broadcast is here: sleep as long as it takes on an emulated link, if there is one."""

    def sends(self, size_bytes: Callable[[], int]) -> None:
        """The sums are sent next: sleep as long as they take on an emulated link, if there is one."""

    def _sleep_until(self, lasts_s: float) -> float:
        """Until so long after `begin`; returns the seconds since then."""
        seconds = self._clock() - self._began_s
        if (rest_s := lasts_s - seconds - self._behind_s) > 0:
            self._sleep(rest_s)
            seconds = self._clock() - self._began_s
        self._behind_s += seconds - lasts_s
        return seconds


class DevicePacer(Pacer):
    """Makes an executor as slow as a device of a fleet, and its messages as slow as the device's link."""

    def __init__(
        self,
        client_s: Callable[[int, int], float],
        emulation: SpeedEmulation,
        *,
        receive_s: Callable[[int], float],
        send_s: Callable[[int], float],
        clock: Callable[[], float] = time.perf_counter,
        core: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`client_s(samples, pass)` is the device's time for a client, before the changes of `emulation`; `receive_s`
        and `send_s` are seconds of so many bytes from the coordinator and to it."""
        super().__init__(lambda seconds, _: seconds, clock=clock, core=core, sleep=sleep)
        self._client_s, self._factors = client_s, emulation.factors()
        self._receive_s, self._send_s = receive_s, send_s

    def end(self, samples: int = 0) -> float:
        """The seconds are the device's: what this machine adds to them is taken from the next clients' sleep. Only
        where training here takes longer than there, they are this machine's, of a core."""
        device_s = self._client_s(samples, self._number) * self._factors(self._round)
        lasts_s = max(device_s, self._core() - self._core_began_s)
        self._sleep_until(lasts_s)
        return lasts_s

    def received(self, size_bytes: Callable[[], int]) -> None:
        self._sleep(self._receive_s(size_bytes()))

    def sends(self, size_bytes: Callable[[], int]) -> None:
        self._sleep(self._send_s(size_bytes()))
