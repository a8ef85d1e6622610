"""A virtual clock: a heap of things to do, each at its time; and random factors for durations, replayable from a
seed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable

import numpy as np


class VirtualClock:
    """Runs actions in order of time. `now_s` is the time of the action that runs.

    Which of two actions due at the same instant goes first is drawn from the seed, because in a real run either may.
    Actions of one lane (a link, a device's compute lane) keep the order in which they were asked for, as in a real
    run they would. A lane's draw depends on its name alone: one more lane changes nothing between the others.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._draws: dict[Hashable, float] = {}
        self._seed = seed
        self._asked = 0

    def at(self, time_s: float, lane: Hashable, action: Callable[[], None]) -> None:
        """Run `action` when the clock reaches `time_s`, which must not have passed."""
        assert time_s >= self.now_s, f"asked for {time_s} s at {self.now_s} s"
        draw = self._draws.get(lane)
        if draw is None:
            draw = self._draws[lane] = random.Random(f"{self._seed} {lane}").random()
        self._asked += 1
        heapq.heappush(self._heap, (time_s, draw, self._asked, action))

    def run(self, most_s: float = math.inf) -> None:
        """Until nothing is left to do up to this time."""
        while self._heap and self._heap[0][0] <= most_s:
            self.now_s, _, _, action = heapq.heappop(self._heap)
            action()


class Jitter:
    """Log-normal factors with mean 1: exp(sigma z - sigma^2 / 2), z normal. With sigma 0 exactly 1."""

    def __init__(self, sigma: float, seed: int) -> None:
        self._sigma = sigma
        self._generator = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def __call__(self) -> float:
        if not self._sigma:
            return 1.0
        if not self._drawn:  # drawn many at once: a draw by itself takes as long as the rest of an event
            self._drawn = self._generator.lognormal(-(self._sigma**2) / 2, self._sigma, 4096)[::-1].tolist()
        return self._drawn.pop()
