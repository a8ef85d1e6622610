"""How many bytes of gradients a device can sum in a time, if it is one of R replicas: from above.

The parameters of one stage in each replica are a group of R devices. With B bytes in a time s:

    sharded       2 (latency + B / R / bandwidth) <= s on each link of the group
    ring          2 (R - 1) (latency + B / R / bandwidth) <= s on each link of the ring
    hierarchical  as sharded between the leaders of L sites; then B there and back inside a site with other members

So a device needs R - 1 links that are good enough, or one in and one out, or links to L - 1 sites. Each cut of another
replica begins a group at most, and all replicas together have at most `devices - R` cuts: a device is in no more than
1 + devices - R groups. Over all groups its links carry each byte at least once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from isthmus.fleet import Fleet, Link
from isthmus.verification.disjoint_sets import CutsNeeded
from isthmus.verification.question import FLOAT32_BYTES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SLACK = 1 + 1e-9  # factor on limits: rounding must not exclude what keeps to them
SHORTEST_S, AGES_S = 1e-9, 1e30  # between them lies what anything takes
MOST_REACHED = 32  # devices, of which it is known how well each reaches each
MOST_QUALITIES = 12  # speeds of links for which the devices that faster links join are counted


class MostSummed(NamedTuple):
    """Bytes, by kind of device."""

    group: Floats  # bytes of one group: a block is in one
    stage: Floats  # bytes of all groups of a device


class PairSummed(NamedTuple):
    """Bytes that some two of more than `joined` devices of different replicas sum with each other at most."""

    sharded: float  # bytes of all groups together: a link carries 2 / R of each
    otherwise: float  # bytes of each group in a ring or a hierarchy, which may leave out the link between the two
    uneven: float  # so much less of each group may cross the link, for rounding to elements
    joined: int = 1  # devices that better links may join; 1: it is so of any two
    mixed: float = 0.0  # so much of a group may be summed otherwise though it is sharded: in another step of a period

    def cuts(self, blocks: Floats, replicas: int) -> CutsNeeded:
        """Return the cuts that blocks with so many bytes of gradients need.

        Take an interval of blocks with more bytes than `sharded + (R - joined) * otherwise`. If more than `joined`
        replicas have no cut inside, all its groups have the same two devices, which no better link joins. What exceeds
        `sharded` needs one group more than R - joined, so the others have so many cuts inside. Else R - joined replicas
        have one. Blocks above `otherwise` are sharded: with more than `sharded` of these, no more than `joined`
        replicas are without a cut. Intervals may share a block, but no place to cut.
        """
        others = replicas - self.joined
        pair = self._intervals(blocks, math.inf) if self.joined == 1 else 0
        return CutsNeeded(others * self._intervals(blocks, others * self.otherwise), pair)

    def _intervals(self, blocks: Floats, more: float) -> int:
        found, start, total, large = 0, 0, 0.0, 0.0
        for block, size_bytes in enumerate(blocks.tolist()):
            own = max(0.0, size_bytes - self.uneven)
            of_large = max(0.0, own - self.mixed) if size_bytes > self.otherwise * SLACK else 0.0
            total, large = total + own, large + of_large
            if block > start and (total > (self.sharded + more) * SLACK or large > self.sharded * SLACK):
                found, start, total, large = found + 1, block, own, of_large
        return found


class SumLimits:
    """`names`: one list of exchangeable devices for each kind. In `period` steps every parameter is summed once."""

    def __init__(self, fleet: Fleet, names: Sequence[Sequence[str]], period: int = 1) -> None:
        devices = [name for kind in names for name in kind]
        self._first = np.cumsum([0, *map(len, names)])[:-1]
        self._count = len(devices)
        self._latency, self._byte_s = np.full((2, self._count, self._count), np.inf)
        kind_of = self._kind = [k for k, kind in enumerate(names) for _ in kind]
        known = dict[tuple[int, int], Link]()
        for (a, source), (b, target) in itertools.permutations(enumerate(devices), 2):
            ends = kind_of[a], kind_of[b]
            link = known[ends] if ends in known else known.setdefault(ends, fleet.link(source, target))
            self._latency[a, b], self._byte_s[a, b] = link.latency_s, 1 / link.bandwidth_bytes_per_s
        regions = [fleet.device(name).region for name in devices]
        self._region = np.array([sorted(set(regions)).index(region) for region in regions])
        self._period, self._uneven = period, FLOAT32_BYTES * period
        """Bytes: parts of a buffer differ by an element, in each step."""
        self._links = GroupLinks(self._latency, self._byte_s, self._region, self._uneven)

    def most(self, seconds: float, fewest: int, most: int) -> MostSummed:
        """In this time, whichever number of replicas in fewest..most there are."""
        seconds = min(seconds, AGES_S)
        links, sites = self._links, int(self._region.max()) + 1
        # Beyond so many replicas as there are sites, more of them change nothing for a hierarchy.
        numbers = range(fewest, most + 1)
        group = np.max([links.flat(seconds, replicas) for replicas in numbers], axis=0)
        for replicas in {min(n, sites + 1) for n in numbers if n > 2}:
            group = np.maximum(group, links.led(seconds, replicas))
        groups = 1 + self._count - fewest
        carried = links.carried(seconds, fewest)
        return MostSummed(group[self._first], np.minimum(groups * group, carried)[self._first])

    def homes(self, seconds: float, fewest: int, most: int, size_bytes: float) -> list[tuple[int, ...]]:
        """Kinds of devices of which some may sum a group of so many bytes, of fewest..most replicas, in this time.

        A collective joins its group by links over each of which an R-th part goes and an R-th part comes: a group lies
        in one component of the links that carry these. In one of a period's steps it sums its part of the bytes.
        """
        part = max(0.0, size_bytes / self._period / most - FLOAT32_BYTES)
        byte_s = np.where(np.isfinite(self._byte_s), self._byte_s, 0.0)
        usable = 2 * (self._latency + part * byte_s) <= seconds
        _, label = connected_components(csr_matrix(usable | usable.T), directed=False)
        large = np.flatnonzero(np.bincount(label) >= fewest)
        return [tuple(np.unique(np.array(self._kind)[label == one]).tolist()) for one in large]

    def pairs(self, seconds: float, replicas: int) -> list[PairSummed]:
        """Bound sums of two devices in this time: any two, or two among so many that no good links join all."""
        seconds, links = min(seconds, AGES_S), self._links
        alone = 0.0 if replicas == 2 else float(max(x.max() for x in links.otherwise(seconds, replicas)))
        each, found = links.carried_by_each(seconds), list[PairSummed]()
        known = np.unique(each)
        for most in known[np.unique(np.linspace(0, len(known) - 1, MOST_QUALITIES).astype(np.int64))]:
            _, label = connected_components(csr_matrix(each > most), directed=False)
            joined = int(np.bincount(label).max())
            if joined < replicas:
                mixed = alone if self._period > 1 else 0.0
                found.append(PairSummed(most * replicas / 2, alone, self._uneven * replicas, joined, mixed))
        return found


class Gradients(NamedTuple):
    """Bytes, less what rounding may add."""

    whole: float
    block: float  # bytes of its largest block


def least_possible_s(possible: Callable[[float], bool]) -> float:
    """From below, the least time at which it becomes possible; 0 where it takes none."""
    low, high = 0.0, SHORTEST_S
    while not possible(high) and high < AGES_S:
        low, high = high, 8 * high
    for _ in range(16 if low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low


class GroupLinks:
    """The links among devices of which a group is taken: [..., source, target], and the sites [..., device]."""

    def __init__(self, latency: Floats, byte_s: Floats, region: Ints, uneven: int) -> None:
        self._latency, self._byte_s, self._uneven = latency, byte_s, uneven
        self._inside = (region[..., :, None] == region[..., None, :]) & np.isfinite(latency)
        self._across = ~self._inside & np.isfinite(latency)
        self._sites = [region == r for r in range(int(region.max()) + 1)]
        self._known = np.stack([site.any(axis=-1) for site in self._sites], axis=-1).sum(axis=-1)

    def carried(self, seconds: float, replicas: int) -> Floats:
        """[..., device]: by all links of a device. Of more than two replicas it sends and receives what it sums once at
        least; sharded or in a ring, 2 (R - 1) / R times."""
        usable = 2 * self._latency <= seconds
        rounds = 2 if replicas == 2 else 1
        each = np.where(usable, (seconds - rounds * np.where(usable, self._latency, 0.0)) / self._byte_s, 0.0)
        if replicas == 2:
            return np.minimum(each, each.swapaxes(-1, -2)).sum(axis=-1)
        times = 1.0 if self._inside.any() and self._across.any() else 2 * (replicas - 1) / replicas
        return np.minimum(each.sum(axis=-1), each.sum(axis=-2)) / times

    def carried_by_each(self, seconds: float) -> Floats:
        """[..., source, target]: by each link, as many each way."""
        each = self._there(seconds)
        return np.maximum(np.minimum(each, each.swapaxes(-1, -2)), 0.0)

    def otherwise(self, seconds: float, replicas: int) -> tuple[Floats, Floats]:
        """[..., device]: bytes of one group of so many devices, in a ring and hierarchical."""
        hop = self._ring(seconds / (2 * (replicas - 1)), replicas)
        return np.where(hop >= 0, replicas * (hop + self._uneven), 0.0), self.led(seconds, replicas)

    def flat(self, seconds: float, replicas: int) -> Floats:
        """Sharded, or in a ring."""
        part = self._uneven * (replicas > 2)
        each = self._there(seconds / 2)
        each = np.minimum(each, each.swapaxes(-1, -2))
        worst = -np.sort(-each, axis=-1)[..., replicas - 2]
        found = np.where(worst >= 0, replicas * (worst + part), 0.0)
        if replicas == 2:
            return found
        hop = self._ring(seconds / (2 * (replicas - 1)), replicas)
        return np.maximum(found, np.where(hop >= 0, replicas * (hop + part), 0.0))

    def _ring(self, seconds: float, replicas: int) -> Floats:
        """Bytes that every hop of a ring carries in this time: a device has two neighbours, and a way there and back to
        all others."""
        hop = self._there(seconds)
        either = np.sort(np.maximum(hop, hop.swapaxes(-1, -2)), axis=-1)[..., -2]
        found = np.minimum(np.minimum(hop.max(axis=-1), hop.max(axis=-2)), either)
        count = hop.shape[-1]
        if count > MOST_REACHED:
            return found
        for k in range(count):  # Floyd and Warshall: the widest ways
            hop = np.maximum(hop, np.minimum(hop[..., :, k, None], hop[..., None, k, :]))
        hop = np.where(np.eye(count, dtype=bool), -1.0, np.minimum(hop, hop.swapaxes(-1, -2)))
        return np.minimum(found, -np.sort(-hop, axis=-1)[..., replicas - 2])

    def led(self, seconds: float, replicas: int) -> Floats:
        """Hierarchical. Of a leader, by the number of sites; of another member, with a leader of its site. Rounds among
        leaders and rounds inside sites take no less than over the best of such links."""
        inside_s, inside_byte_s = self._best(self._inside)
        across_s, across_byte_s = self._best(self._across)
        sites = np.minimum(replicas - 1, self._known)[..., None]
        leader = np.zeros(self._latency.shape[:-1])
        for count in range(2, int(sites.max()) + 1):
            part_s = self._uneven * np.where(self._across, self._byte_s, 0.0)
            time_s = seconds / 2 - inside_s - self._latency + part_s
            each = self._quotient(time_s, self._byte_s / count + inside_byte_s, self._across)
            by_site = np.stack([np.where(s[..., None, :], each, 0.0).max(axis=-1) for s in self._sites], axis=-1)
            worst = -np.sort(-by_site, axis=-1)[..., count - 2]
            leader = np.where(sites >= count, np.maximum(leader, worst), leader)
        if not sites.max() > 1:
            return leader
        time_s = (
            seconds / 2
            - across_s
            - self._latency
            + self._uneven * np.where(sites > 1, across_byte_s[..., 0], 0.0)[..., None]
        )
        each = self._quotient(time_s, self._byte_s + across_byte_s / np.maximum(sites, 1)[..., None], self._inside)
        return np.maximum(leader, np.minimum(each, leader[..., None, :]).max(axis=-1))

    def _best(self, among: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        latency, byte_s = (np.where(among, x, np.inf).min(axis=(-1, -2)) for x in (self._latency, self._byte_s))
        return latency[..., None, None], byte_s[..., None, None]

    def _quotient(self, time_s: Floats, each_s: Floats, among: NDArray[np.bool_]) -> Floats:
        """Bytes both ways, 0 where the time does not suffice."""
        with np.errstate(invalid="ignore"):
            found = np.where(among & np.isfinite(time_s) & (time_s > 0), time_s / each_s, 0.0)
        return np.minimum(found, found.swapaxes(-1, -2))

    def _there(self, seconds: float) -> Floats:
        """Bytes in this time; below 0 where not even the latency passes in it."""
        usable = self._latency <= seconds
        return np.where(usable, (seconds - np.where(usable, self._latency, 0.0)) / self._byte_s, -1.0)
