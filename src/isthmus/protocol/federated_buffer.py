"""Asynchronous rounds, played ahead: who is at work, when each one ends, and so which updates make which round.

FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022, Alg. 1): so many clients are at
work at any time, each from the model as it was when it began. The next K that end make a round. A client that ends is
replaced at once. How long a client takes is drawn from a half-normal distribution, as in the paper's experiments, times
its samples. Each client's delay is therefore a function of the seed, and a run gives the same bits wherever its clients
are trained. (Rejected: let the executors' own times decide. No run could be repeated, and a few executors are never as
many as the clients that are at work.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from isthmus.protocol.federated_participation import Choose, Integers, Participation
from isthmus.rng import stream

KEPT = 4  # rounds that may be asked for again without playing from the first one on
TRIES = 20  # draws of a client that is not at work yet, before those that are not are counted


class Buffer:
    """`round(r)` says which clients' updates make round r. A pure function of what it is made of; later rounds follow
    from earlier ones, so that the first call for round r plays them all."""

    def __init__(
        self,
        rules: Participation,
        sizes: Integers,
        seed: int,
        here: Callable[[int], Integers | None] = lambda round_: None,
        choose: Choose | None = None,
    ) -> None:
        """`sizes` (population,) in samples; `here` gives the clients that can begin in a round, None for all. `choose`
        is as in `cohort`."""
        self.at_work = rules.asked(len(sizes))
        self.size = min(self.at_work, rules.expected(len(sizes)))  # k, of the paper
        self._rules, self._sizes, self._seed, self._here, self._choose = rules, sizes, seed, here, choose
        self._begin()

    def _begin(self) -> None:
        self._draws = stream(self._seed, "cohort")
        self._next = 0
        self._now = 0.0
        self._working: list[tuple[float, int, int]] = []  # (end, client, round in which it began), a heap
        self._busy: set[int] = set()
        self._made: dict[int, Mapping[int, int]] = {}

    def round(self, round_: int) -> Mapping[int, int]:
        """Return the clients whose updates are in the round, each with the rounds that its update is late."""
        if round_ < self._next and round_ not in self._made:
            self._begin()
        while self._next <= round_:
            self._made[self._next] = self._play(self._next)
            self._made.pop(self._next - KEPT, None)
            self._next += 1
        return self._made[round_]

    def _play(self, round_: int) -> Mapping[int, int]:
        among = self._rules.candidates(self._sizes, self._here(round_))
        sums = np.cumsum(self._sizes[among].astype(np.float64) if self._rules.weighted else np.ones(len(among)))
        done: dict[int, int] = {}
        self._fill(round_, done, among, sums)
        while len(done) < self.size and self._working:
            self._now, client, began = heapq.heappop(self._working)
            self._busy.remove(client)
            dropped = self._rules.dropout > 0 and self._draws.random() < self._rules.dropout
            if not dropped and round_ - began <= self._rules.staleness:
                done[client] = round_ - began
            if len(done) < self.size:  # else the next client begins with the round's new model
                self._fill(round_, done, among, sums)
        return dict(sorted(done.items()))

    def _fill(self, round_: int, done: Mapping[int, int], among: Integers, sums: NDArray[np.float64]) -> None:
        """Begin with others until so many are at work again. Whose update is in already begins in a later round: an
        update counts once a round."""
        while len(self._busy) < self.at_work:
            client = self._draw(round_, done, among, sums)
            if client is None:
                return
            self._busy.add(client)
            lasts = float(self._sizes[client]) * abs(float(self._draws.standard_normal()))
            heapq.heappush(self._working, (self._now + lasts, client, round_))

    def _draw(self, round_: int, done: Mapping[int, int], among: Integers, sums: NDArray[np.float64]) -> int | None:
        for _ in range(TRIES if len(among) and self._choose is None else 0):
            place = np.searchsorted(sums, self._draws.random() * sums[-1], side="right")
            client = int(among[min(int(place), len(among) - 1)])
            if client not in self._busy and client not in done:
                return client
        free = np.array([c for c in among.tolist() if c not in self._busy and c not in done], dtype=np.int64)
        if not len(free):
            return None
        if self._choose is not None:
            return int(self._choose(round_, free, self._sizes[free], 1, self._draws)[0])
        shares = self._sizes[free] / self._sizes[free].sum() if self._rules.weighted else None
        return int(self._draws.choice(free, p=shares))
