"""Local search over whole plans of one replica or more, many neighbours at a time.

Replicas that were cut each for itself can gain from each other: cut alike they average with fewer partners, and a
device whose link averages quickly may be worth a stage although it only slows its pipeline down. All neighbours of one
kind are rows of the closed form (`cost.kernel`):

    step = max over replicas r (fill_r + (m_r - 1) * period_r) + averaging        the m_r sum to n
    price = step * rate of the devices + egress

The best of them is taken if it is better than the plan at hand.

Its micro-batches are split as well as can be. A step only gets longer with a pipeline's share, so whether some split
ends by a time T is a count, and bisection over T leaves fewer choices each time:

    sum over replicas of (the most m_r with fill_r + (m_r - 1) * period_r <= T - averaging) >= n

A stage gains from recomputing only where its memory holds fewer than all micro-batches, and a pipeline only where that
throttles it, or, under gpipe, where it does not fit. Every choice is made where all are tried (`exhaustive`), likely
ones here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from isthmus.cost import PlanLayout, Problem, kernel
from isthmus.cost.averaging import Averaging
from isthmus.cost.blocks import Blocks, coarse
from isthmus.cost.cut_table import cut_table
from isthmus.cost.kernel import Bools, Floats, Ints
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Pipelines, Sent, Trials, joined, most_in_flight, timed
from isthmus.planners.observer import looked_at, stopped
from isthmus.planners.search.fixed_placement import fixed_placement_of
from isthmus.planners.search.local_search import TOLERANCE

MOST_UNUSED = 24  # devices outside the plan that are tried in it: the fastest
KICK_MOVES = 3, 3, 5  # random moves before a descent, drawn from these: few find what is near, many leave a valley
MOST_DRAWN = 50  # random moves that are drawn until one fits
MOST_LOST = 4.0  # times the plan, up to which a random move may make it longer
MOST_EXCHANGING = 6  # replicas up to which all exchange devices with all; beyond, each with the next one


class Stages(NamedTuple):
    """One replica: devices by number, and block boundaries, 0 and the end among them."""

    order: tuple[int, ...]
    ends: tuple[int, ...]


Replicas = tuple[Stages, ...]
Change = Mapping[int, Sequence[Stages]]
"""The changes of each replica: neighbour k changes all of them to their k-th. Equally many stages in each."""


class Found(NamedTuple):
    replicas: Replicas
    shares: tuple[int, ...]
    value: float  # seconds or money of a step


class Descent:
    """One problem. `most` bounds the neighbours looked at, and so the time, the same on every machine."""

    def __init__(self, problem: Problem, network: FleetNetwork, blocks: Blocks, most: int) -> None:
        self.problem, self.network, self.blocks, self.left = problem, network, blocks, most
        self._averaging = Averaging(problem.fleet, network, blocks)
        self._fixed = fixed_placement_of(problem, network)
        self._anywhere = not (problem.constraints.data_holders or problem.constraints.labels_stay)
        self._priced = problem.constraints.objective == "cost"
        self._kept: dict[tuple[Stages, int], Pipelines] = {}

    def run(self, layouts: Sequence[PlanLayout], known: float, kicks: int = 0) -> tuple[float, list[PlanLayout]] | None:
        """Better layouts than these, which take `known`, and what they take, in seconds or money by the objective; None
        where none was found. Cuts are places of `blocks`. After the descent, so many times random moves and a descent
        from there."""
        start = Found(self._replicas(layouts), tuple(layout.micro_batches for layout in layouts), known)
        now, source = self._descended(start), random.Random(0)
        for _ in range(kicks):
            kicked = self._kicked(now, source)
            if kicked is None or self.left <= 0 or stopped(0):
                break
            other = self._descended(kicked)
            if other.value < now.value * (1 - TOLERANCE):
                now = other
        return None if now is start else (now.value, list(map(self._layout, now.replicas, now.shares)))

    def _layout(self, stages: Stages, share: int) -> PlanLayout:
        order = tuple(self.network.names[d] for d in stages.order)
        return PlanLayout(order, tuple(self.blocks.boundaries(stages.ends[1:-1])), share)

    def _replicas(self, layouts: Sequence[PlanLayout]) -> Replicas:
        number = {name: d for d, name in enumerate(self.network.names)}
        place = {position: block for block, position in enumerate(self.blocks.places)}
        return tuple(
            Stages(
                tuple(number[name] for name in layout.order),
                (0, *(place[b] for b in layout.boundaries), self.blocks.count),
            )
            for layout in layouts
        )

    def _descended(self, now: Found) -> Found:
        quiet = False
        while not quiet and self.left > 0:
            quiet = True
            for change in self._changes(now.replicas):
                if stopped(len(next(iter(change.values())))):
                    return now
                found = self._best(now, change, now.value * (1 - TOLERANCE))
                if found is not None:
                    now, quiet = found, False
                    break
        return now

    def _kicked(self, now: Found, source: random.Random) -> Found | None:
        """After a few random moves that fit, each a likely one of its kind; None where none was found."""
        for _ in range(source.choice(KICK_MOVES)):
            changes, moved = list(self._changes(now.replicas)), None
            for _ in range(MOST_DRAWN if changes else 0):
                change = source.choice(changes)
                k = source.randrange(len(next(iter(change.values()))))
                one = {r: [several[k]] for r, several in change.items()}
                moved = self._best(now, one, MOST_LOST * now.value)
                if moved is not None:
                    break
            if moved is None:
                return None
            now = moved
        return now

    def _best(self, now: Found, change: Change, goal: float) -> Found | None:
        """The best of the neighbours, if it is below the goal."""
        count, replicas = len(next(iter(change.values()))), now.replicas
        self.left -= count
        share = -(-self.problem.micro_batches // len(replicas))
        pipelines = [
            self._timed(change[r], share) if r in change else self._as_it_is(stages, share)
            for r, stages in enumerate(replicas)
        ]
        rows = np.stack(
            [np.arange(count) if r in change else np.zeros(count, dtype=np.int64) for r in range(len(replicas))], axis=1
        )
        fits = np.all([p.held[rows[:, r]].min(axis=1) >= 1 for r, p in enumerate(pipelines)], axis=0)
        rows = rows[fits]
        if not len(rows):
            return None
        sync_s = self._averaging.nearly_s(self._averaging.holders(pipelines, rows)) / self.problem.sync.every
        # step = max over r (fill_r + (m_r - 1) * period_r) + averaging; price = step * rate + egress
        choose = cheapest if self._priced else soonest
        found = choose(pipelines, rows, sync_s, self.problem.micro_batches, goal)
        if found is None:
            return None
        k = max(found.rows[r] for r in change)
        changed = tuple(change[r][k] if r in change else s for r, s in enumerate(replicas))
        return Found(changed, found.shares, found.value)

    def _as_it_is(self, stages: Stages, share: int) -> Pipelines:
        if (stages, share) not in self._kept:
            self._kept[stages, share] = self._timed((stages,), share)
        return self._kept[stages, share]

    def _timed(self, several: Sequence[Stages], share: int) -> Pipelines:
        return likely_choice(self.problem, self.network, self._trials(several), share)

    def _trials(self, several: Sequence[Stages]) -> Trials:
        row: dict[tuple[int, ...], int] = {}
        cuts = np.array([row.setdefault(stages.ends, len(row)) for stages in several])
        return Trials(cut_table(self.blocks, np.array(list(row))), cuts, np.array([s.order for s in several]))

    def _changes(self, now: Replicas) -> Iterator[Change]:
        used = {d for stages in now for d in stages.order}
        by_speed = sorted(set(range(len(self.network.names))) - used, key=lambda d: -float(self.network.speed[d]))
        unused = by_speed[:MOST_UNUSED]
        for r, stages in enumerate(now):
            alike = [s.ends for s in now if len(s.ends) == len(stages.ends) and s.ends != stages.ends]
            for several in neighbours(stages, unused, dict.fromkeys(alike)):
                allowed = [other for other in several if self._keeps_terms(other)]
                if allowed:
                    yield {r: allowed}
        for r, s in itertools.combinations(range(len(now)), 2):
            if len(now) <= MOST_EXCHANGING or s == r + 1:
                for a, b, pairs in (
                    (r, s, _exchanged(now[r], now[s])),
                    (r, s, _moved(now[r], now[s])),
                    (s, r, _moved(now[s], now[r])),
                ):
                    # A device at both ends may have gone from one of them only.
                    apart = (pair for pair in pairs if not set(pair[0].order) & set(pair[1].order))
                    allowed = [pair for pair in apart if all(map(self._keeps_terms, pair))]
                    if allowed:
                        first, second = zip(*allowed, strict=True)
                        yield {a: first, b: second}

        yield from self._together(now)

    def _together(self, now: Replicas) -> Iterator[Change]:
        """Replicas that are cut alike stay so: the same cut of all moves, or the same stage of all goes."""
        for ends in dict.fromkeys(stages.ends for stages in now):
            alike = [r for r, stages in enumerate(now) if stages.ends == ends]
            for moved in (_cuts, _shorter) if len(alike) > 1 else ():
                every = zip(*(moved(now[r]) for r in alike), strict=True)
                allowed = [several for several in every if all(map(self._keeps_terms, several))]
                if allowed:
                    yield dict(zip(alike, zip(*allowed, strict=True), strict=True))

    def _keeps_terms(self, stages: Stages) -> bool:
        """Return whether the ends are where the data are, and no device has two stages but both ends where labels
        stay."""
        order, fixed = stages.order, self._fixed
        if self._anywhere:
            return True
        first, last = order[0], order[-1]
        around = fixed.labels_stay and len(set(order)) > 1 and first == last
        return (
            len(set(order)) == len(order) - around
            and first in fixed.holders
            and fixed.may_end(last)
            and stages.ends[len(order) - 1] <= self.blocks.last_start
        )


def places(problem: Problem, layouts: Iterable[PlanLayout], count: int) -> Blocks:
    """Where cuts may be moved to: so many places, and their own."""
    used = {position for layout in layouts for position in layout.boundaries}
    return Blocks(problem, sorted({*coarse(Blocks(problem), count).places[1:-1], *used}))


def neighbours(stages: Stages, unused: Sequence[int], cuts: Iterable[tuple[int, ...]] = ()) -> Iterator[list[Stages]]:
    """Yield the neighbours of one replica, by kind; `cuts` are whole ones that are tried too."""
    yield [*(Stages(stages.order, ends) for ends in cuts), *_cuts(stages)]
    yield list(_orders(stages, unused))
    yield list(_longer(stages, unused))
    yield list(_shorter(stages))


def _cuts(stages: Stages) -> Iterator[Stages]:
    """One cut moves by one place, or by twice as many, and so on."""
    for k in range(1, len(stages.ends) - 1):
        for sign in (-1, 1):
            by = 1
            while stages.ends[k - 1] < stages.ends[k] + sign * by < stages.ends[k + 1]:
                yield Stages(stages.order, (*stages.ends[:k], stages.ends[k] + sign * by, *stages.ends[k + 1 :]))
                by *= 2


def _orders(stages: Stages, unused: Sequence[int]) -> Iterator[Stages]:
    """Devices change places, or one makes room for an unused one."""
    order = stages.order
    for places in _permutations(len(order)):
        yield stages._replace(order=tuple(order[k] for k in places))
    for i, device in itertools.product(range(len(order)), unused):
        yield stages._replace(order=(*order[:i], device, *order[i + 1 :]))


@cache
def _permutations(size: int) -> list[tuple[int, ...]]:
    """Two places swap, a part is turned round, or one place moves."""
    places, found = tuple(range(size)), list[tuple[int, ...]]()
    for i, j in itertools.combinations(places, 2):
        before, part, after = places[:i], places[i : j + 1], places[j + 1 :]
        found.append((*before, j, *part[1:-1], i, *after))
        found.append((*before, *part[::-1], *after))
        found.append((*before, *part[1:], i, *after))
        found.append((*before, j, *part[:-1], *after))
    return list(dict.fromkeys(found))


def _longer(stages: Stages, unused: Sequence[int]) -> Iterator[Stages]:
    """A stage is split and one part given to an unused device."""
    for k, (start, end) in enumerate(itertools.pairwise(stages.ends)):
        places = {start + (end - start) * part // 4 for part in (1, 2, 3)} | {start + 1, end - 1}
        for place, device, at in itertools.product(sorted(places), unused, (k, k + 1)):
            if start < place < end:
                order = (*stages.order[:at], device, *stages.order[at:])
                yield Stages(order, (*stages.ends[: k + 1], place, *stages.ends[k + 1 :]))


def _shorter(stages: Stages) -> Iterator[Stages]:
    """A device goes, and its stage to a neighbour."""
    for k in range(len(stages.order)):
        for cut in {k, k + 1} & set(range(1, len(stages.order))):
            yield Stages((*stages.order[:k], *stages.order[k + 1 :]), (*stages.ends[:cut], *stages.ends[cut + 1 :]))


def _exchanged(first: Stages, second: Stages) -> Iterator[tuple[Stages, Stages]]:
    """Two devices of different replicas swap."""
    for i, j in itertools.product(range(len(first.order)), range(len(second.order))):
        a, b = list(first.order), list(second.order)
        a[i], b[j] = b[j], a[i]
        yield first._replace(order=tuple(a)), second._replace(order=tuple(b))


def _moved(giver: Stages, taker: Stages) -> Iterator[tuple[Stages, Stages]]:
    """A device goes from one replica to another."""
    for shorter in _shorter(giver):
        for device in set(giver.order) - set(shorter.order):
            for longer in _longer(taker, (device,)):
                yield shorter, longer


def every_choice(
    problem: Problem, network: FleetNetwork, trials: Trials, known_s: float, micro_batches: int = 1
) -> Pipelines:
    """Those that fit and that could end so many micro-batches before `known_s` if memory throttled none, each with
    every set of its stages that may gain."""
    plain = timed(problem, network, trials)
    # A stage that recomputes only adds to it.
    rows = np.flatnonzero(plain.at_least_s(micro_batches) < known_s)
    plain, trials = plain[rows], trials[rows]
    pipelines = joined([plain, *_others(problem, network, trials, plain)])
    pipelines = pipelines[pipelines.fitting()]
    return pipelines[np.flatnonzero(pipelines.at_least_s(micro_batches) < known_s)]


def likely_choice(problem: Problem, network: FleetNetwork, trials: Trials, micro_batches: int) -> Pipelines:
    """One choice per trial: none, the stages that throttle it, or all that are short of memory; the soonest with so
    many micro-batches."""
    sent = Sent.of(network, trials)
    plain = timed(problem, network, trials, sent=sent)
    hindered = _hindered(problem, plain) if problem.recompute else np.zeros(len(trials.order), dtype=bool)
    best, best_s = plain, plain.step_s(micro_batches)
    for stages in (throttling(plain), plain.held < most_in_flight(problem)) if hindered.any() else ():
        chosen = stages & hindered[:, None]
        if chosen.any():
            other = timed(problem, network, trials, chosen, sent)
            other_s = other.step_s(micro_batches)
            better = np.flatnonzero(chosen.any(axis=1) & (other_s < best_s))
            best = best.put(better, other[better])
            best_s[better] = other_s[better]
    return best


def _others(problem: Problem, network: FleetNetwork, trials: Trials, plain: Pipelines) -> Iterator[Pipelines]:
    if not problem.recompute:
        return
    short, hindered = plain.held < most_in_flight(problem), _hindered(problem, plain)
    stages = range(short.shape[1])
    for size in range(1, len(stages) + 1):
        for chosen in itertools.combinations(stages, size):
            rows: Ints = np.flatnonzero(hindered & short[:, chosen].all(axis=1))
            if len(rows):
                recompute = np.zeros((len(rows), len(stages)), dtype=bool)
                recompute[:, chosen] = True
                yield timed(problem, network, trials[rows], recompute)


def _hindered(problem: Problem, plain: Pipelines) -> Bools:
    """[pipelines]: whether memory throttles them, or does not hold what gpipe asks."""
    if problem.schedule == "gpipe":
        return np.less(plain.most, problem.micro_batches)
    return np.asarray(throttling(plain).any(axis=1))


def throttling(plain: Pipelines) -> Bools:
    """[pipelines, stages]: stages whose round trip over what they hold is longer than anything is busy."""
    return np.greater(plain.round_trip_s, plain.busy_s[:, None] * np.maximum(plain.held, 1))


MOST_HALVINGS = 60


class Split(NamedTuple):
    value: float  # seconds or money of a step
    rows: tuple[int, ...]  # per replica, the pipeline
    shares: tuple[int, ...]


def soonest(
    pipelines: Sequence[Pipelines], rows: Ints, sync_s: Floats, micro_batches: int, goal_s: float
) -> Split | None:
    """The choice that ends first, if before `goal_s`.

    `rows` is [choices, replicas], into each replica's pipelines; `sync_s` [choices] what averaging takes.
    """
    if len(pipelines) == 1:
        alone_s = pipelines[0].step_s(micro_batches)[rows[:, 0]] + sync_s
        row = int(alone_s.argmin())
        value = float(alone_s[row])
        return Split(value, (int(rows[row, 0]),), (micro_batches,)) if value < goal_s else None
    rows, sync_s = _in_time(pipelines, rows, sync_s, micro_batches, goal_s)
    if not len(rows):
        return None
    low, high = 0.0, goal_s
    # Some choice ends by T: sum over r of (the most m_r with fill_r + (m_r - 1) * period_r <= T - averaging) >= n.
    for _ in range(MOST_HALVINGS):
        middle = (low + high) / 2
        if high - low <= TOLERANCE / 10 * high:
            break
        looked_at(0)
        left, left_sync_s = _in_time(pipelines, rows, sync_s, micro_batches, middle)
        if len(left):
            rows, sync_s, high = left, left_sync_s, middle
        else:
            low = middle
    chosen = tuple(int(row) for row in rows[0])
    return Split(high, chosen, _shares(pipelines, chosen, micro_batches, high - float(sync_s[0])))


def cheapest(
    pipelines: Sequence[Pipelines], rows: Ints, sync_s: Floats, micro_batches: int, goal: float
) -> Split | None:
    """The choice that costs least money, each ending as soon as it can, if below the goal.

    What micro-batches send is paid as the dearest replica's would be; what averaging sends is left out.
    """
    high = sync_s + np.max([p.at_most_s(micro_batches)[rows[:, r]] for r, p in enumerate(pipelines)], axis=0)
    low, first = np.zeros(len(rows)), _able(pipelines, rows, high - sync_s, micro_batches)
    rows, sync_s, low, high = rows[first], sync_s[first], low[first], high[first]
    if not len(rows):
        return None
    for _ in range(MOST_HALVINGS):
        middle = (low + high) / 2
        able = _able(pipelines, rows, middle - sync_s, micro_batches)
        low, high = np.where(able, low, middle), np.where(able, middle, high)
    rate = np.sum([p.rate[rows[:, r]] for r, p in enumerate(pipelines)], axis=0)
    sent = np.max([p.sent[rows[:, r]] for r, p in enumerate(pipelines)], axis=0)
    price = kernel.price(high, rate, micro_batches * sent)
    best = int(price.argmin())
    if price[best] >= goal:
        return None
    chosen = tuple(int(row) for row in rows[best])
    return Split(
        float(price[best]), chosen, _shares(pipelines, chosen, micro_batches, float(high[best] - sync_s[best]))
    )


def _able(pipelines: Sequence[Pipelines], rows: Ints, time_s: Floats, micro_batches: int) -> Bools:
    """[choices]: whether some split ends within the time, averaging apart."""
    counts = [p.counts(rows[:, r], time_s, micro_batches) for r, p in enumerate(pipelines)]
    return (np.min(counts, axis=0) > 0) & (np.sum(counts, axis=0) >= micro_batches)


def _in_time(
    pipelines: Sequence[Pipelines], rows: Ints, sync_s: Floats, micro_batches: int, time_s: float
) -> tuple[Ints, Floats]:
    """Those choices of which some split ends by then."""
    able = _able(pipelines, rows, time_s - sync_s, micro_batches)
    return rows[able], sync_s[able]


def _shares(pipelines: Sequence[Pipelines], rows: Sequence[int], micro_batches: int, time_s: float) -> tuple[int, ...]:
    """A split that is in time: each replica what it manages, less what is too much."""
    shares = [
        int(p.counts(np.array([row]), np.array([time_s]), micro_batches)[0])
        for p, row in zip(pipelines, rows, strict=True)
    ]
    for r in range(len(shares)):
        shares[r] -= min(shares[r] - 1, sum(shares) - micro_batches)
    return tuple(shares)
