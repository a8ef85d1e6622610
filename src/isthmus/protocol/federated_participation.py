"""Which clients take part in a round: a pure function of the seed, the round and the rules."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    who is late is drawn: see `federated_buffer`."""

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
