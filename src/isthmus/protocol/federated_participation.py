"""Which clients take part in a round: a pure function of the seed, the round and the rules.

Asynchronous rounds, played ahead: who is at work, when each one ends, and so which updates make which round.

FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022, Alg. 1): so many clients are at
work at any time, each from the model as it was when it began. The next K that end make a round. A client that ends is
replaced at once. How long a client takes is drawn from a half-normal distribution, as in the paper's experiments, times
its samples. Each client's delay is therefore a function of the seed, and a run gives the same bits wherever its clients
are trained. (Rejected: let the executors' own times decide. No run could be repeated, and a few executors are never as
many as the clients that are at work.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.rng import stream
from isthmus.units import exact, parse_duration

Integers = NDArray[np.int64]
Choose = Callable[[int, Integers, Integers, int, np.random.Generator], Integers]
"""Chooses clients: of a round, of these (clients,) with so many samples, at most so many."""


class Participation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The clients of a round, and when it closes. One of `clients` and `fraction` says how many."""

    clients: Annotated[int, Meta(ge=1)] | None = None  # Clients per round.
    fraction: Annotated[float, Meta(gt=0, le=1)] | None = None  # Share of all clients per round.
    weighted: bool = False
    """Draw clients in proportion to their samples, in place of evenly. A mean that weighs by samples does so still."""
    poisson: bool = False
    """Draw every client by itself, so that their number varies: what differential privacy counts on. A round of nobody
    has its noise and changes nothing else."""
    select: str | None = None
    """Choose clients by `package.module:function` of your own, in place of a draw: a pure function of the round, the
    clients that can take part, their samples, how many to choose at most, and a generator of random numbers."""
    min_samples: Annotated[int, Meta(ge=1)] = 1
    """Clients with fewer samples never take part: batch norm, say, cannot train on one."""
    availability: str | None = None  # A CSV file of clients and the times from and to which they can take part.
    round_length: str = "60 s"  # The time between two rounds.
    over_select: Annotated[float, Meta(ge=1)] = 1.0
    """So many times more clients are asked than are needed; the round closes when enough are in."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Probability that a client that was drawn does not take part after all."""
    quorum: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the clients needed at which the round closes, rounded up, also where some are away or late: 0.5 of 5 are
    3."""
    minimum: Annotated[int, Meta(ge=1)] = 1
    """Fewer clients than this never make a round, but that `poisson` may draw nobody."""
    deadline: str = "600 s"
    """After this time a round closes with the updates received so far, or is tried again if they are fewer than
    `minimum`."""
    attempts: Annotated[int, Meta(ge=1)] = 3  # How often a round that fails is tried again before the run ends.
    staleness: Annotated[int, Meta(ge=0)] = 0
    """When a round closes without a client, its update counts in a later round, so many rounds on at most, for
    1 / sqrt(1 + rounds late) of what it says (FedBuff: Nguyen et al. 2022; the buffer is the quorum). In a simulation
    who is late is drawn."""

    @property
    def round_length_s(self) -> float:
        return parse_duration(self.round_length, "federated.participation.round_length")

    def needed(self, population: int) -> int:
        """Clients per round. UserError for more than there are, and for none or both of the ways to say it."""
        if (self.clients is None) == (self.fraction is None):
            got = "none" if self.clients is None else "both"
            instead = "" if self.clients is None else ": leave one out, or set one to null (in Python None)"
            raise UserError(
                f"federated.participation: got {got} of clients and fraction, expected one of them{instead}"
            )
        if self.clients is None:
            return max(1, round(exact(self.fraction or 0) * population))
        if self.clients > population:
            raise UserError(
                f"federated.participation.clients: got {self.clients}, expected at most the {population} clients"
            )
        return self.clients

    def asked(self, population: int, here: int | None = None) -> int:
        """Clients that are asked so that `needed` ones answer, of those that can take part; None: all can."""
        most = population if here is None else here
        return min(most, at_least(self.over_select, self.needed(population)))

    def candidates(self, sizes: Integers, here: Integers | None) -> Integers:
        """(candidates,) clients that can take part, ascending: of those that are `here`, or of all, those with enough
        of their `sizes` (population,) samples."""
        among = np.arange(len(sizes)) if here is None else here
        return among if self.min_samples == 1 else among[sizes[among] >= self.min_samples]

    def expected(self, population: int) -> int:
        """Updates in a round when all goes well: where late ones count, as many as close it."""
        wanted = self.needed(population)
        return min(population, max(self.minimum, at_least(self.quorum, wanted))) if self.staleness else wanted


def at_least(share: float, count: int) -> int:
    """The smallest whole number that is at least this share of a count: 0.1 of 30 is 3, whatever floats make of it."""
    return math.ceil(exact(share) * count)


def cohort(
    rules: Participation,
    sizes: Integers,
    seed: int,
    round_: int,
    here: Integers | None = None,
    choose: Choose | None = None,
) -> Integers:
    """(drawn,) client numbers, ascending; those that drop out are drawn and left out.

    `sizes` (population,) in samples; `here` are the clients that can take part, ascending, None for all; `choose` is
    what `rules.select` names, and None draws. The same for the same arguments, on every machine. Where there are
    candidates only `poisson` draws nobody: else, if all would drop out, the first stays.
    """
    among = rules.candidates(sizes, here)
    wanted = rules.asked(len(sizes), len(among))
    draws = stream(seed, "cohort", round_)
    if choose is not None:
        drawn = choose(round_, among, sizes[among], wanted, draws)
    elif rules.poisson:
        drawn = among[draws.random(len(among)) < rules.needed(len(sizes)) / len(sizes)]
    elif wanted == len(among):
        drawn = among
    elif rules.weighted:
        shares = sizes[among] / sizes[among].sum()
        drawn = draws.choice(among, wanted, replace=False, p=shares, shuffle=False)
    else:
        drawn = draws.choice(among, wanted, replace=False, shuffle=False)
    drawn = np.sort(drawn)
    if rules.dropout:
        stays = stream(seed, "dropout", round_).random(len(drawn)) >= rules.dropout
        drawn = drawn[stays] if stays.any() or rules.poisson else drawn[:1]
    return drawn.astype(np.int64)


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
