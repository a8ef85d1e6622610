"""The graph of sites that share masks: everybody with everybody, or, from about 100 sites on, each with some (SecAgg+).

Bell, Bonawitz, Gascon, Lepoint and Raykova, Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020:
a random graph in which each site has about log(n) neighbours hides each update as well, as long as few sites of a
neighbourhood collude or drop out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from isthmus.units import exact

COMPLETE_BELOW = 100  # sites: fewer are all neighbours
LEAST_SUMMED = 2  # updates in a sum: of one update the sum is that update
PER_DOUBLING = 10
"""Neighbours for each doubling of the sites: of up to 1,000 sites a fifth may collude, and a fifth drop out. That any
neighbourhood has a majority of either then has a probability below 2^-30."""


def neighbour_count(sites: int) -> int:
    """Return how many neighbours each of so many sites has. It is even where the graph is sparse."""
    if sites < COMPLETE_BELOW:
        return sites - 1
    return min(sites - 1, 2 * math.ceil(PER_DOUBLING * math.log2(sites) / 2))


def neighbours(keys: Mapping[str, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the neighbours of each site, ascending. `keys` are the sites' public keys: they shuffle the ring in which
    each site has its nearest ones for neighbours, so a coordinator that follows the protocol does not choose them."""
    count = neighbour_count(len(keys))
    if count == len(keys) - 1:
        return {site: tuple(sorted(keys.keys() - {site})) for site in keys}
    salt = hashlib.sha256(b"".join(keys[site] for site in sorted(keys))).digest()
    ring = sorted(keys, key=lambda site: hashlib.sha256(salt + site.encode()).digest())
    steps = [step for half in range(1, count // 2 + 1) for step in (half, -half)]
    return {site: tuple(sorted(_at(ring, place, steps))) for place, site in enumerate(ring)}


def _at(ring: Sequence[str], place: int, steps: Sequence[int]) -> list[str]:
    return [ring[(place + step) % len(ring)] for step in steps]


def threshold_of(holders: int, share: float) -> int:
    """Shares that give back a secret that was dealt to so many: more than `share` of them."""
    return min(holders, math.floor(exact(share) * holders) + 1)
