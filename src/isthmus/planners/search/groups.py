"""Which devices form a replica: groups of devices, each a pipeline, scored without cutting the model.

As in `orders`, every device takes work in proportion to its speed. Stages of different replicas that hold the same part
of the model then average it, over the links between them; so fast links are wanted inside groups for activations, and
between groups for gradients, and the search weighs one against the other (DT-FM, section 3, decides the same trade-off
for equal devices).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from isthmus.cost.network import FleetNetwork, Floats
from isthmus.planners.search.local_search import first_improvement, nearest_tour
from isthmus.planners.search.orders import ROUNDING, Order, Scorer, improve, nearest_neighbour

MOST_MOVES = 600
"""Scores per improvement of one grouping: bounds the time, the same on every machine."""
SCORES_PER_ORDER = 200


class ReplicaGrouping(NamedTuple):
    """Replicas as orders of devices, the micro-batches of each, and the score in seconds per step."""

    orders: tuple[Order, ...]
    shares: tuple[int, ...]
    step_s: float


@dataclass(frozen=True)
class GroupScorer:
    """`gradient_bytes` are those of the whole model, in float32."""

    pipeline: Scorer
    network: FleetNetwork
    gradient_bytes: float
    _times: dict[Order, tuple[float, float]] = field(default_factory=dict[Order, tuple[float, float]])

    def grouping(self, orders: Sequence[Order], worth_s: float = float("inf")) -> ReplicaGrouping:
        """Averaging is left out where the pipelines alone take `worth_s`."""
        times = [self._fill_and_period(order) for order in orders]
        shares = share_out(times, self.pipeline.micro_batches)
        slowest_s = max(fill + (m - 1) * period for (fill, period), m in zip(times, shares, strict=True))
        sync_s = self.averaging_s(orders) if slowest_s < worth_s else 0.0
        return ReplicaGrouping(tuple(orders), shares, slowest_s + sync_s)

    def shares_within(self, orders: Sequence[Order], most: Sequence[int]) -> tuple[int, ...]:
        """The micro-batches of each where memory holds no more than `most`."""
        return share_out([self._fill_and_period(order) for order in orders], self.pipeline.micro_batches, most)

    def _fill_and_period(self, order: Order) -> tuple[float, float]:
        """Kept: a move changes one order or two, and the others come again."""
        if order not in self._times:
            self._times[order] = self.pipeline.fill_and_period(order)
        return self._times[order]

    def averaging_s(self, orders: Sequence[Order]) -> float:
        """A sharded parameter server per part of the model that the same devices hold."""
        if len(orders) < 2:
            return 0.0
        ends = [np.cumsum(self.network.speed[list(o)]) / self.network.speed[list(o)].sum() for o in orders]
        marks = np.unique(np.concatenate(ends).round(9))
        lengths = np.diff(marks, prepend=0.0)
        middles = marks - lengths / 2
        parts = [np.minimum(np.searchsorted(e, middles), len(e) - 1) for e in ends]
        holders = np.stack([np.asarray(o)[p] for o, p in zip(orders, parts, strict=True)], axis=1)
        a, b = holders[:, :, None], holders[:, None, :]
        shard = (2 * lengths * self.gradient_bytes / len(orders))[:, None, None]
        loads = np.zeros_like(self.network.byte_s)
        np.add.at(loads, (a, b), shard * self.network.byte_s[a, b])
        return float(loads.max() + 2 * self.network.latency[a, b].max())


def share_out(
    times: Sequence[tuple[float, float]], micro_batches: int, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Micro-batches per replica, one at least and `most` of each at most, so that the last replica ends as early as
    possible.

    `times` are (fill, period) per replica. The next micro-batch always goes to the replica that would end first with
    it, which is optimal because a replica's end only rises with its share; all that end before a time at which not all
    are done yet are handed out at once. AssertionError for too few or too many.
    """
    assert micro_batches >= len(times), "every replica needs a micro-batch"
    limits = np.full(len(times), micro_batches) if most is None else np.asarray(most)
    assert limits.min() >= 1 and limits.sum() >= micro_batches, "the replicas have room for all"
    fills = np.array([fill for fill, _ in times], dtype=np.float64)
    periods = np.maximum([period for _, period in times], 1e-300)
    # When all would be done if micro-batches could be split, by the replicas that fill first: the least over how many
    # these are. Nobody ends earlier, and rounding down leaves few over.
    first = np.argsort(fills)
    rate, filled = np.cumsum(1.0 / periods[first]), np.cumsum(fills[first] / periods[first])
    time_s = float(((micro_batches - len(times) + filled) / rate).min())
    done = 1 + np.clip((time_s - fills) / periods, 0, micro_batches).astype(np.int64)
    done = np.minimum(done, limits)
    shares = done if done.sum() <= micro_batches else np.ones(len(times), dtype=np.int64)
    while shares.sum() < micro_batches:
        shares[int(np.where(shares < limits, fills + shares * periods, np.inf).argmin())] += 1
    return tuple(int(share) for share in shares)


def every_grouping(devices: int) -> Iterator[tuple[Order, ...]]:
    """Every way to put the devices 0, 1, ... into groups, in no order (set partitions: 52 for five devices)."""
    if not devices:
        yield ()
        return
    for orders in every_grouping(devices - 1):
        yield (*orders, (devices - 1,))
        for k, order in enumerate(orders):
            yield (*orders[:k], (*order, devices - 1), *orders[k + 1 :])


def groupings(scorer: GroupScorer, regions: Sequence[int], count: int, worth_s: float) -> list[ReplicaGrouping]:
    """Good groupings into `count` replicas, the best first. `regions` has the region's number per device.

    Those that begin with a score above `worth_s` are not improved.
    """
    seeds = [scorer.grouping(seed) for seed in dict.fromkeys(_seeds(scorer, regions, count))]
    better = [improved(scorer, seed) if seed.step_s <= worth_s else seed for seed in seeds]
    return sorted({_canonical(g): g for g in better}.values(), key=lambda g: g.step_s)


def _canonical(grouping: ReplicaGrouping) -> tuple[Order, ...]:
    return tuple(sorted(grouping.orders))


def _seeds(scorer: GroupScorer, regions: Sequence[int], count: int) -> Iterator[tuple[Order, ...]]:
    tour = nearest_neighbour(scorer.pipeline, int(scorer.network.speed.argmax()))
    yield _ordered(scorer, _cut(tour, scorer.network.speed, count))
    # Replicas across the regions, so that what averages is near: deal the tour out like cards.
    yield _ordered(scorer, [tour[k::count] for k in range(count)])
    # The fastest regions, a replica each; and one region alone, dealt out.
    members: dict[int, list[int]] = {}
    for device, region in enumerate(regions):
        members.setdefault(region, []).append(device)
    by_speed = sorted(members.values(), key=lambda group: -float(scorer.network.speed[group].sum()))
    if 1 < count <= len(by_speed):
        yield _ordered(scorer, by_speed[:count])
    if count <= len(by_speed[0]) and len(by_speed) > 1:
        yield _ordered(scorer, [by_speed[0][k::count] for k in range(count)])
    # Equal speeds, whatever the links.
    groups: list[list[int]] = [[] for _ in range(count)]
    totals = np.zeros(count)
    for device in sorted(range(len(regions)), key=lambda d: -float(scorer.network.speed[d])):
        least = int(totals.argmin())
        groups[least].append(device)
        totals[least] += float(scorer.network.speed[device])
    yield _ordered(scorer, groups)


def _cut(tour: Order, speed: Floats, count: int) -> list[Order]:
    """Pieces of about equal speed, none empty."""
    done = np.cumsum(speed[list(tour)])
    cuts = [int(np.searchsorted(done, done[-1] * k / count)) + 1 for k in range(1, count)]
    for k in range(len(cuts)):
        cuts[k] = min(max(cuts[k], (cuts[k - 1] if k else 0) + 1), len(tour) - (count - 1 - k))
    return [tour[a:b] for a, b in itertools.pairwise((0, *cuts, len(tour)))]


def _ordered(scorer: GroupScorer, groups: Sequence[Sequence[int]]) -> tuple[Order, ...]:
    return tuple(_order(scorer, group) for group in groups)


def _order(scorer: GroupScorer, group: Sequence[int]) -> Order:
    """The group as a pipeline: from its fastest device to the nearest next one, then improved."""
    fastest = max(set(group), key=lambda d: float(scorer.network.speed[d]))
    return improve(scorer.pipeline, tuple(nearest_tour(scorer.pipeline.pair_s, fastest, group)), SCORES_PER_ORDER)


def improved(scorer: GroupScorer, grouping: ReplicaGrouping) -> ReplicaGrouping:
    """First improvement over swaps and moves of devices between replicas, or out of all, until none helps."""
    return first_improvement(
        grouping,
        lambda now: (scorer.grouping(other, now.step_s) for other in _neighbours(now.orders)),
        lambda now: now.step_s,
        most=MOST_MOVES,
        tolerance=ROUNDING,
    )


def _neighbours(orders: tuple[Order, ...]) -> Iterator[tuple[Order, ...]]:
    places = [(r, k) for r, order in enumerate(orders) for k in range(len(order))]
    for r, k in places:
        if len(orders[r]) > 1:
            without = orders[r][:k] + orders[r][k + 1 :]
            yield _with(orders, {r: without})
            for other, target in enumerate(orders):
                if other != r:
                    for at in range(len(target) + 1):
                        yield _with(orders, {r: without, other: (*target[:at], orders[r][k], *target[at:])})
    for (r, k), (s, j) in itertools.combinations(places, 2):
        first = _replaced(orders[r], k, orders[s][j])
        if r != s:
            yield _with(orders, {r: first, s: _replaced(orders[s], j, orders[r][k])})
        else:
            yield _with(orders, {r: _replaced(first, j, orders[r][k])})


def _replaced(order: Order, place: int, device: int) -> Order:
    return (*order[:place], device, *order[place + 1 :])


def _with(orders: tuple[Order, ...], changed: dict[int, Order]) -> tuple[Order, ...]:
    return tuple(changed.get(r, order) for r, order in enumerate(orders))
