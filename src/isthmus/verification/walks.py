"""The least fill of any pipeline under a threshold, by a dynamic programme over cuts and kinds of devices.

Devices with the same speed, room and links are one kind. A state is a boundary, the kind that ran the stage before it,
and how many devices of each `tracked` kind are used:

    F[used, kind, end] = min over (before, start) of F[used - kind, before, start] + stage(kind, start, end)
                         + message(before, kind, start, end)

and where the stage before begins, by class (`stage_arrays`).

A kind that is not tracked may come any number of times (the state space is relaxed: Christofides, Mingozzi and Toth
1981), for a price each time. Every stage and every link keeps to the threshold. So does a stage's round trip over the
micro-batches that its device holds, with the shortest round trip of any pipeline that continues it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from isthmus.verification.device_sets import INFINITE, DeviceKinds, Tracked
from isthmus.verification.disjoint_sets import CutsNeeded
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.stage_arrays import Floats, StageArrays
from isthmus.verification.sum_limits import Gradients, MostSummed, SumLimits, least_possible_s

Ints = NDArray[np.int64]
SLACK = 1 + 1e-9  # factor on a threshold: rounding must not exclude what keeps to it
NARROW = 1e-9


MOST_BLOCKS = 400
MOST_DEVICES = 128
MOST_ENTRIES = 1_500_000  # entries of a table of stages by kinds
EACH = 5_000  # entries that take as long as it takes to begin with an array: about 10^8 are a second
MOST_AT_ONCE = 200_000  # entries of the cost of all continuations together
MOST_KEPT = 8_000_000  # seconds of messages, three times, that are kept


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The constraints of pipelines."""

    threshold_s: float  # per micro-batch, of every stage and link
    more_than: int
    """The replica has more micro-batches: a stage that holds no more is held up by its round trip, or does not fit."""
    among: tuple[int, ...] | None = None  # kinds that a pipeline may have; None: all
    prices_s: Floats | None = None  # [kind]: added for each device of that kind
    sums_s: float = INFINITE  # most that sums of gradients may take
    fewest: int = 2
    most: int = 2  # replicas that sum them
    devices: int = MOST_DEVICES  # tracked ones of one replica, at most
    home: tuple[int, ...] | None = None  # kinds of which a device has the largest block of gradients


class Walk(NamedTuple):
    """A pipeline of the relaxation."""

    kinds: tuple[int, ...]
    cut: tuple[int, ...]  # 0, the boundaries, and the number of blocks
    period_s: float  # the longest that a stage or a link is busy with a micro-batch, or that a round trip holds up each


class Walks:
    """One problem. `work` counts array entries, and `EACH` for each array."""

    def __init__(self, arrays: StageArrays, kinds: DeviceKinds, question: Question) -> None:
        self.arrays, self.kinds, self._question = arrays, kinds, question
        self.work, self._period = 0, question.period
        self.gpipe = question.schedule == "gpipe"  # every stage holds all micro-batches
        speed = kinds.speed[:, None, None]
        again = 2 if question.recompute else 1
        self.compute_s = [(arrays.forward * (1 + n) + arrays.backward)[None] / speed for n in range(again)]
        each = (arrays.received + arrays.saved, arrays.received + arrays.columns)
        fixed = (arrays.fixed, arrays.fixed + arrays.saved)
        room = kinds.room[:, None, None]
        self.held: list[Floats] = []
        """[kind, start, length - 1]: micro-batches that fit; below 0 where the state does not."""
        for n in range(again):
            free = np.where(np.isfinite(room), room - fixed[n][None], INFINITE)
            with np.errstate(divide="ignore", invalid="ignore"):
                held = np.where((each[n] > 0)[None] & np.isfinite(free), np.floor(free / each[n][None]), INFINITE)
            self.held.append(np.where(free < 0, -1.0, held))
        self._far_s = self._far()
        self._gradient_sizes = np.unique(arrays.gradients)
        count = arrays.blocks
        blocks = np.minimum(np.arange(count)[:, None] + np.arange(count), count - 1)
        self._largest_gradients = np.maximum.accumulate(arrays.gradients[blocks, 0], axis=1)
        """[start, length - 1]: of one block."""
        start, largest = np.arange(count)[:, None], int(arrays.gradients[:, 0].argmax())
        self._has_largest = (start <= largest) & (largest <= start + np.arange(count))
        """[start, length - 1]: whether a stage has the block with most gradients."""
        self._limits = SumLimits(question.fleet, [kind.names for kind in kinds.all], question.period)
        self._gradients = Gradients(arrays.gradients[0, -1] * (1 - NARROW), arrays.gradients[:, 0].max() * (1 - NARROW))
        free = np.full(len(kinds.all), INFINITE)
        self._unlimited = MostSummed(free, free)
        self._most_summed: dict[tuple[float, int, int], MostSummed] = {}
        joined = np.isfinite(kinds.byte_s)
        self.byte_s = np.where(joined, kinds.byte_s, 0.0)
        self.latency = np.where(joined, kinds.latency, 0.0)
        self._apart = np.where(joined, 0.0, INFINITE)
        self._sent: dict[int, tuple[Floats, Floats, Floats]] = {}
        """The results of `messages` by start, where they are small."""
        self._few = len(arrays.near_there) * arrays.blocks**2 * len(kinds.all) ** 2 <= MOST_KEPT

    @property
    def entries(self) -> int:
        """Costs that a programme with one state adds up."""
        return (
            len(self.arrays.near_there) * len(self.kinds.all) ** 2 * self.arrays.blocks * (self.arrays.blocks + 1) // 2
        )

    def least_work_s(self) -> Floats:
        """[kind]: seconds of the whole model's forward and backward."""
        return self.compute_s[0][:, 0, -1]

    def shortest_period_s(self) -> float:
        """Bound any pipeline's period from below: all devices share the work; the largest block is not divided."""
        work_s = self.least_work_s()
        together_s = 1 / float((self.kinds.counts / np.maximum(work_s, 1e-300)).sum())
        return max(together_s, float(self.compute_s[0][:, :, 0].min(axis=0).max()))

    def components(self, among: Sequence[int], threshold_s: float, limit_s: float) -> list[tuple[int, ...]]:
        """These kinds, apart where no pipeline joins them: the least message between two stages keeps a link busy for
        longer than the threshold, or takes the limit there and back."""
        there, back = (x[:, 1:, 0].min(initial=INFINITE) for x in (self.arrays.near_there, self.arrays.near_back))
        there_s = there * self.byte_s + self.latency * (there > 0)
        back_s = back * self.byte_s.T + self.latency.T * (back > 0)
        usable = np.maximum(there * self.byte_s, back * self.byte_s.T) <= threshold_s * SLACK
        usable &= (there_s + back_s <= limit_s) & (self._apart == 0)
        own = np.ix_(among, among)
        _, label = connected_components(csr_matrix((usable | usable.T)[own]), directed=False)
        return [tuple(np.array(among)[label == one].tolist()) for one in range(int(label.max()) + 1)]

    def held_ranges(self, most: int) -> list[tuple[int, int]]:
        """Ranges (more than, up to) of a replica's micro-batches: one where memory holds up nothing."""
        if not any(bool((held < most).any()) for held in self.held):
            return [(0, most)]
        ends = [0, *itertools.takewhile(lambda n: n < most, (1 << k for k in itertools.count())), most]
        return list(itertools.pairwise(ends))

    def _far(self) -> Floats:
        """[class, kind, start, length - 1]: seconds of what comes from an unknown earlier stage, over the best link."""
        kinds, a = self.kinds, self.arrays
        found = np.zeros((len(a.far_there), len(kinds.all), a.blocks, a.blocks))
        if not (a.far_there.any() or a.far_shared.any()):
            return found
        there, back = kinds.byte_s.min(axis=0), kinds.byte_s.min(axis=1)
        both = (kinds.byte_s + kinds.byte_s.T).min(axis=0)
        latency = (kinds.latency + kinds.latency.T).min(axis=0)
        for rate, size in (
            (there, a.far_there),
            (back, a.far_back),
            (both, a.far_shared),
            (latency, a.far_count),
        ):
            with np.errstate(invalid="ignore"):
                per = size[..., None, :, :]
                found += np.where(per > 0, rate[:, None, None] * per, 0.0)
        return found

    def messages(self, start: int, width: int) -> tuple[Floats, Floats, Floats]:
        """[class, source, target, length - 1]: seconds of what a stage that begins here receives and returns, shared
        parameters too; how long a micro-batch keeps the busier link from the stage before, or the uplink, busy; and the
        seconds of its messages with the stage before."""
        if not self._few:
            return self._messages_of(start, width)
        if start not in self._sent:
            self._sent[start] = self._messages_of(start, self.arrays.blocks - start)
        sent_s, busy_s, near_s = self._sent[start]
        return sent_s[..., :width], busy_s[..., :width], near_s[..., :width]

    def _messages_of(self, start: int, width: int) -> tuple[Floats, Floats, Floats]:
        there = self.arrays.near_there[:, None, None, start, :width]
        back = self.arrays.near_back[:, None, None, start, :width]
        there_s, back_s = self.byte_s[..., None] * there, self.byte_s.T[..., None] * back
        busy_s = np.maximum(there_s, back_s)
        up = self.kinds.uplink_s
        if up.any():
            busy_s = np.maximum(busy_s, np.maximum(up[..., None] * there, up.T[..., None] * back))
        near_s = there_s + back_s + self.latency[..., None] * (there > 0) + self.latency.T[..., None] * (back > 0)
        near_s = near_s + self._apart[..., None]
        shared, count = (x[:, None, None, start, :width] for x in (self.arrays.near_shared, self.arrays.near_count))
        byte_s, latency = self.byte_s + self.byte_s.T, self.latency + self.latency.T
        once_s = byte_s[..., None] * shared + latency[..., None] * count
        return near_s + once_s + self._far_s[:, None, :, start, :width], busy_s, near_s

    def _widths(self, threshold_s: float) -> Ints:
        """[start]: most blocks that any kind computes within the threshold."""
        blocks = self.arrays.blocks
        fits = self.compute_s[0].min(axis=0) <= threshold_s * SLACK
        most = np.where(np.arange(blocks) < (blocks - np.arange(blocks))[:, None], fits, False).sum(axis=1)
        return np.maximum(most, 0)

    def stages(self, terms: Terms) -> Floats:
        """[kind, start, length - 1]: seconds of compute; infinite where a stage cannot keep to the terms."""
        arrays, limit_s = self.arrays, terms.threshold_s * SLACK
        allowed = np.ones_like(self.compute_s[0], dtype=bool)
        summed = self._summed(terms)
        if np.isfinite(summed.stage).any():
            allowed = arrays.gradients <= summed.stage[:, None, None] * SLACK
            allowed &= self._largest_gradients <= summed.group[:, None, None] * SLACK
        if terms.home is not None:
            away = np.isin(np.arange(len(self.kinds.all)), terms.home, invert=True)
            allowed &= ~(self._has_largest & away[:, None, None])
        if terms.among is not None:
            allowed &= np.isin(np.arange(len(self.kinds.all)), terms.among)[:, None, None]
        least = terms.more_than + 1 if self.gpipe else 1
        options = [
            np.where(allowed & (held >= least) & (compute_s <= limit_s), compute_s, INFINITE)
            for compute_s, held in zip(self.compute_s, self.held, strict=True)
        ]
        if self.gpipe or not any(bool((h <= terms.more_than).any()) for h in self.held):
            return np.minimum.reduce(options)
        return self._held_up(terms, options)

    def options(self, terms: Terms, stages: Floats, most: int) -> tuple[Floats, Floats]:
        """[recomputed, kind, start, length - 1]: seconds of compute of these stages (`stages`), infinite where none may
        be; and one divided by the micro-batches that a stage holds, where these hold it up. A stage that holds `most`,
        which is all that a replica may have, is not recomputed."""
        possible, plain = np.isfinite(stages), self.held[0] >= most
        least = terms.more_than + 1 if self.gpipe else 1
        options, over_held = list[Floats](), list[Floats]()
        for again, (compute_s, held) in enumerate(zip(self.compute_s, self.held, strict=True)):
            allowed = possible & (held >= least) & (compute_s <= terms.threshold_s * SLACK)
            if again:
                allowed &= ~plain
            options.append(np.where(allowed, compute_s, INFINITE))
            over_held.append(np.where(allowed & (held <= terms.more_than), 1 / np.maximum(held, 1.0), 0.0))
        return np.stack(options), np.stack(over_held)

    def _summed(self, terms: Terms) -> MostSummed:
        return self.most_summed(terms.sums_s, terms.fewest, terms.most)

    def most_summed(self, sums_s: float, fewest: int, most: int) -> MostSummed:
        """In the mean over a period's steps."""
        if not np.isfinite(sums_s):
            return self._unlimited
        if (sums_s, fewest, most) not in self._most_summed:
            found = self._limits.most(sums_s * self._period * SLACK, fewest, most)
            self._most_summed[sums_s, fewest, most] = found
        return self._most_summed[sums_s, fewest, most]

    def homes(self, sums_s: float, fewest: int, most: int) -> list[tuple[int, ...]]:
        """Kinds among which the largest block's gradients may be summed in this time, each a case for itself."""
        if not self._gradients.block:
            return [tuple(range(len(self.kinds.all)))]
        return self._limits.homes(sums_s * self._period * SLACK, fewest, most, self._gradients.block)

    def cuts_needed(self, sums_s: float, replicas: int) -> CutsNeeded:
        """Return the cuts that so many replicas need that sum in this time."""
        if not np.isfinite(sums_s):
            return CutsNeeded()
        pairs = self._limits.pairs(sums_s * self._period * SLACK, replicas)
        found = [pair.cuts(self.arrays.gradients[:, 0], replicas) for pair in pairs]
        return CutsNeeded(*(max(each, default=0) for each in zip(*found, strict=True))) if found else CutsNeeded()

    def least_sums_s(self, fewest: int, most: int) -> float:
        """Return the least time of sums of so many replicas: so many devices hold the largest block, and all together
        sum the model so many times."""
        counts = self.kinds.counts

        def possible(sums_s: float) -> bool:
            summed = self.most_summed(sums_s, fewest, most)
            together = (counts * np.minimum(summed.stage, self._gradients.whole)).sum()
            enough = together * SLACK >= fewest * self._gradients.whole
            return bool(enough and counts[summed.group >= self._gradients.block].sum() >= fewest)

        return least_possible_s(possible)

    def alike(self, terms: Terms) -> Hashable:
        """The same for terms that allow the same stages, at the same prices."""
        summed = self._summed(terms)
        ranks = [np.searchsorted(self._gradient_sizes, x * SLACK, side="right").tobytes() for x in summed[:2]]
        prices = terms.prices_s.tobytes() if terms.prices_s is not None else b""
        return terms.threshold_s, terms.more_than, terms.devices, terms.home, *ranks, prices

    def _held_up(self, terms: Terms, options: Sequence[Floats]) -> Floats:
        """Without stages whose round trip over what they hold exceeds the threshold. From the last block on: `home_s`
        is the least time from the end of a stage's forward to the return of its gradient."""
        blocks, limit_s = self.arrays.blocks, terms.threshold_s * SLACK
        kept = np.full_like(options[0], INFINITE)
        home_s = np.zeros((len(self.kinds.all), blocks + 1))
        widths = self._widths(terms.threshold_s)
        for start in range(blocks - 1, -1, -1):
            width = int(widths[start])
            if not width:
                home_s[:, start] = INFINITE
                continue
            ahead = home_s[:, start + 1 : start + 1 + width]
            last = np.arange(start + 1, start + 1 + width) == blocks
            for option, held in zip(options, self.held, strict=True):
                compute_s, most = option[:, start, :width], held[:, start, :width]
                with np.errstate(invalid="ignore", divide="ignore"):
                    quick = last[None] | (most > terms.more_than) | ((compute_s + ahead) / most <= limit_s)
                kept[:, start, :width] = np.minimum(kept[:, start, :width], np.where(quick, compute_s, INFINITE))
            if start:
                _, busy_s, near_s = (x[0] for x in self.messages(start, width))
                through_s = near_s + (kept[:, start, :width] + ahead)[None]
                through_s = np.where(busy_s <= limit_s, through_s, INFINITE)
                returned = (self.arrays.near_there[0, start, :width] > 0) & (
                    self.arrays.near_back[0, start, :width] > 0
                )
                through_s = np.where(returned | ~np.isfinite(through_s), through_s, 0.0)
                home_s[:, start] = through_s.min(axis=(1, 2))
                self.work += through_s.size + EACH
        return kept

    def solve(self, tracked: Tracked, terms: Terms, stages: Floats) -> Floats:
        """[class, state, kind, end]: the least fill of the first `end` blocks, prices included."""
        count, blocks, classes = len(self.kinds.all), self.arrays.blocks, len(self.arrays.near_there)
        priced = stages if terms.prices_s is None else stages + terms.prices_s[:, None, None]
        found = np.full((classes, tracked.size, count, blocks + 1), INFINITE)
        widths = self._widths(terms.threshold_s)
        steps = np.flatnonzero(tracked.devices[tracked.after] <= terms.devices)
        before, after, kind = tracked.before[steps], tracked.after[steps], tracked.kind[steps]
        total = np.full((tracked.size, count, int(widths[0])), INFINITE)
        total[0] = priced[:, 0, : int(widths[0])]
        self._put(found, 0, after, kind, total[before, kind])
        for start in range(1, blocks):
            width, here = int(widths[start]), found[..., start]
            if not width or not np.isfinite(here).any():
                continue
            sent_s, busy_s, _ = self.messages(start, width)
            cost = (
                np.where(busy_s <= terms.threshold_s * SLACK, sent_s, INFINITE) + priced[None, None, :, start, :width]
            )
            self._put(found, start, after, kind, self._continued(here, cost)[before, kind])
        return found

    def _put(self, found: Floats, start: int, states: Ints, kinds: Ints, seconds: Floats) -> None:
        """[step, length - 1]: seconds until the end of a stage of such a kind that begins here, where they are less."""
        width = seconds.shape[1]
        classes = self.arrays.covered[start, :width]
        ends = np.arange(start + 1, start + 1 + width)
        at = classes[None, :], states[:, None], kinds[:, None], ends[None, :]
        found[at] = np.minimum(found[at], seconds)

    def _continued(self, here: Floats, cost: Floats) -> Floats:
        """[state, target, length - 1]: the least over the stage before, its class and kind."""
        classes, states, sources = here.shape
        self.work += EACH
        if here.size * cost[0, 0].size <= MOST_AT_ONCE:
            self.work += here.size * cost[0, 0].size
            return (here.transpose(0, 2, 1)[..., None, None] + cost[:, :, None]).min(axis=(0, 1))
        total = np.full((states, *cost.shape[2:]), INFINITE)  # one kind after another, to stay in the cache
        for known, source in itertools.product(range(classes), range(sources)):
            rows = np.flatnonzero(np.isfinite(here[known, :, source]))
            self.work += len(rows) * cost[known, source].size
            if len(rows) == states:
                np.minimum(total, here[known, :, source, None, None] + cost[known, source][None], out=total)
            elif len(rows):
                total[rows] = np.minimum(total[rows], here[known, rows, source, None, None] + cost[known, source][None])
        return total

    def follow(self, tracked: Tracked, terms: Terms, found: Floats, stages: Floats) -> Walk:
        """The pipeline of the least fill. Read backwards: its predecessor is where the sum is the same."""
        priced = stages if terms.prices_s is None else stages + terms.prices_s[:, None, None]
        back = {k: dict(zip(b.tolist(), a.tolist(), strict=True)) for k, (a, b) in tracked.steps.items()}
        end, shape = self.arrays.blocks, found.shape[:3]
        known, state, kind = (int(x) for x in np.unravel_index(found[..., end].argmin(), shape))
        kinds, cut, period_s, home_s = [kind], [end], 0.0, 0.0
        while True:
            earlier, reached = back[kind][state], float(found[known, state, kind, end])
            at = known, kind, end
            start, source, known = self._predecessor(found[:, earlier], priced, terms, at, reached, first=earlier == 0)
            cell = kind, start, end - start - 1
            period_s = max(period_s, self._period_s(cell, home_s, terms))
            cut.append(start)
            if source < 0:
                return Walk(tuple(reversed(kinds)), tuple(reversed(cut)), period_s)
            _, busy_s, near_s = (x[known] for x in self.messages(start, end - start))
            period_s = max(period_s, float(busy_s[source, kind, -1]))
            near = self.arrays.near_there[known], self.arrays.near_back[known]
            through_s = float(near_s[source, kind, -1]) + float(self.compute_s[0][cell]) + home_s
            home_s = through_s if near[0][cell[1:]] > 0 and near[1][cell[1:]] > 0 else 0.0
            kinds.append(source)
            state, kind, end = earlier, source, start

    def _predecessor(
        self, found: Floats, priced: Floats, terms: Terms, at: tuple[int, int, int], reached: float, *, first: bool
    ) -> tuple[int, int, int]:
        """(start, kind before, its class) of the stage of this kind and class that ends here; no kind is -1."""
        own, kind, end = at
        offers = list[tuple[float, int, int, int]]()
        for start in range(end):
            stage_s, before = priced[kind, start, end - start - 1], found[:, :, start]
            if self.arrays.covered[start, end - start - 1] != own or not np.isfinite(stage_s):
                continue
            if start == 0 and first:
                offers.append((abs(float(stage_s) - reached), 0, -1, 0))
            if start and np.isfinite(before).any():
                sent_s, busy_s, _ = (x[:, :, kind, -1] for x in self.messages(start, end - start))
                total = np.where(busy_s <= terms.threshold_s * SLACK, before + sent_s + stage_s, INFINITE)
                known, source = divmod(int(total.argmin()), total.shape[1])
                offers.append((abs(float(total[known, source]) - reached), start, source, known))
        _, start, source, known = min(offers)
        return start, source, known

    def _period_s(self, cell: tuple[int, int, int], home_s: float, terms: Terms) -> float:
        """Return a stage's period by the best choice whether it recomputes; the last stage may not be held up."""
        last = cell[1] + cell[2] + 1 == self.arrays.blocks
        found: list[float] = []
        for compute_s, held in zip(self.compute_s, self.held, strict=True):
            seconds, most = float(compute_s[cell]), float(held[cell])
            if most >= 1:
                held_up = not last and most <= terms.more_than
                found.append(max(seconds, (seconds + home_s) / most if held_up else 0.0))
        return min(found, default=0.0)


def ample_bytes(arrays: StageArrays, micro_batches: int) -> float:
    """Return the bytes of a device that holds the model, with all micro-batches, however it is cut."""
    last = arrays.blocks - 1
    each = arrays.saved[0, last] + float(arrays.received.max(initial=0.0)) + arrays.columns[0, last]
    return float(arrays.fixed[0, last] + arrays.saved[0, last] + micro_batches * each)


def walkable(reading: GraphReading) -> bool:
    """Return whether the relaxation knows the problem: time is minimised, no device has two stages, and tables are
    small."""
    question = reading.question
    constraints, blocks, devices = question.constraints, len(reading.places) + 1, len(question.fleet.names)
    if constraints.objective != "time" or constraints.labels_stay or constraints.copied:
        return False
    return blocks <= MOST_BLOCKS and devices <= MOST_DEVICES and devices * blocks**2 <= MOST_ENTRIES
