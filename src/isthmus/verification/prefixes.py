"""The least P of prefixes, by the devices that they have: whether one replica may take less than a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isthmus.verification.stage_figures import Bools, Floats, Ints
from isthmus.verification.stage_seconds import NEVER, StageSeconds

CHUNK = 400_000  # entries of an array


class OutOfWork(Exception):
    pass


@dataclass
class Work:
    """Entries of arrays that were filled."""

    spent: float = 0.0
    most: float = float("inf")
    ended: Callable[[], bool] = bool  # asked now and then

    def add(self, entries: float) -> None:
        self.spent += entries
        if self.spent > self.most or self.ended():
            raise OutOfWork


class Prefixes:
    """Pipelines with so many micro-batches, below a limit; one of `replicas`."""

    def __init__(self, of: StageSeconds, limit_s: float, count: int, replicas: int, work: Work) -> None:
        self._of, self._limit_s, self._more, self._work = of, limit_s, count - 1, work
        self._needs = of.needs(count)
        summed = replicas > 1 and of.question.gradients and of.question.period == 1
        self._sums_s = of.sums_s if summed else np.zeros_like(of.sums_s)
        compute_s = of.compute_s[0]
        late = count * compute_s + self._sums_s >= limit_s
        self._needs = (np.where(late, NEVER, self._needs[0]), np.where(late, NEVER, self._needs[1]))
        self._kinds = range(len(of.classes.speed))
        self._behind = [of.behind(self._needs, limit_s, kind) for kind in self._kinds]
        self._figures = [self._of_stages(kind) for kind in self._kinds]
        self._links = {(a, b): self._of_link(a, b) for a in self._kinds for b in self._kinds}

    def _of_stages(self, kind: int) -> tuple[Floats, ...]:
        """Latest beginnings and seconds without and with recomputing, the trunk's message, and whether it is on it."""
        of, stages = self._of, self._behind[kind]
        at = kind, stages.begin, stages.end
        latest = [self._limit_s - need[at] for need in self._needs]
        compute = [each[at] for each in of.compute_s]
        on = of.figures.on_trunk[stages.begin, stages.end]
        latency_s = (of.classes.latency_s[kind] + of.classes.latency_s[:, kind]).min()
        behind = np.where(of.figures.behind_trunk[stages.begin, stages.end], latency_s, -NEVER)
        trunk_s = np.where(on, np.maximum(of.trunk_s[kind, stages.begin], behind), behind)
        return latest[0], latest[1], compute[0], compute[1], trunk_s, on.astype(np.float64)

    def _of_link(self, a: int, b: int) -> tuple[Floats, Floats]:
        """Seconds of messages where a stage on b waits for one on a, and up to when it may begin to for the link."""
        of, stages, sent = self._of, self._behind[b], self._of.figures.messages
        begins = of.ends[2][stages.before]
        there, back = (x[begins, stages.begin, stages.end] for x in sent[:2])
        byte_s, back_s = of.classes.byte_s[a, b], of.classes.byte_s[b, a]
        linked = sent.linked[begins, stages.begin, stages.end]
        busy_s = np.maximum(there * byte_s, back * back_s)
        messages_s = of.classes.latency_s[a, b] + of.classes.latency_s[b, a] + there * byte_s + back * back_s
        latest_s = self._limit_s - messages_s - of.compute_s[0][b, stages.begin, stages.end] - self._more * busy_s
        return np.where(linked, messages_s, -NEVER), np.where(linked, latest_s, NEVER / 2)

    def run(self) -> Bools:
        of = self._of
        states, counts, strides = of.classes.state_counts, of.classes.counts, of.classes.strides
        size, rows, done = states.sum(axis=1), len(of.ends[1]), of.ends[0][-1][0]
        possible = np.zeros(len(states), dtype=bool)
        level = {int(strides[k]): self._first(k) for k in self._kinds if of.classes.holds[k]}
        numbers = np.array(sorted(level), dtype=np.int64)
        shape = len(self._kinds), rows
        ahead = np.stack([np.full((2, *shape), NEVER) for _ in numbers]) if len(numbers) else np.zeros((0, 2, *shape))
        for row, number in enumerate(numbers.tolist()):
            for kind in self._kinds:
                if strides[kind] == number and of.classes.holds[kind]:
                    ahead[row, :, kind] = level[number]
        for _ in range(int(size.max())):
            possible[numbers[(ahead[:, 0, :, done] < NEVER / 2).any(axis=1)]] = True
            some = (ahead[:, 0] < NEVER / 2).any(axis=(1, 2))
            numbers, ahead = numbers[some], ahead[some]
            if not len(numbers):
                break
            if of.labels_from is not None:
                possible[numbers[self._ended_at_home(ahead)]] = True
            free = states[numbers] < counts
            targets = np.unique(np.concatenate([numbers[free[:, k]] + strides[k] for k in self._kinds]))
            grown = np.full((len(targets), 2, *shape), NEVER)
            for kind in self._kinds:
                chosen = np.flatnonzero(free[:, kind])
                into = np.searchsorted(targets, numbers[chosen] + strides[kind])
                for a in self._kinds:
                    open_ = (ahead[chosen, 0, a] < NEVER / 2).any(axis=1)
                    self._follow(ahead, chosen[open_], grown, into[open_], a, kind)
            numbers, ahead = targets, grown
        return possible

    def _first(self, kind: int) -> Floats:
        """[2, row]: stages that begin the model."""
        of, rows = self._of, self._of.ends[0]
        found = np.full((2, len(of.ends[1])), NEVER)
        for end in range(1, of.figures.count):
            plain, again = (need[kind, 0, end] < self._limit_s for need in self._needs)
            if plain or again:
                row = rows[end][0]
                found[0, row] = of.compute_s[0 if plain else 1][kind, 0, end] + self._sums_s[kind, 0, end]
                found[1, row] = found[0, row] if of.figures.on_trunk[0, end] else 0.0
        return found

    def _follow(self, ahead: Floats, chosen: Ints, grown: Floats, into: Ints, a: int, b: int) -> None:
        stages = self._behind[b]
        if not len(stages.before) or not len(chosen):
            return
        step = max(1, CHUNK // len(stages.before))
        for k in range(0, len(chosen), step):
            rows, targets = chosen[k : k + step], into[k : k + step]
            spent, trunk = self._after(ahead[rows, :, a], a, b)
            for number, found in enumerate((spent, trunk)):
                least = np.minimum.reduceat(found, stages.starts, axis=1)
                at = grown[targets[:, None], number, b, stages.into[None]]
                grown[targets[:, None], number, b, stages.into[None]] = np.minimum(at, least)

    def _after(self, ahead: Floats, a: int, b: int) -> tuple[Floats, Floats]:
        """[state, stage]: P and compute of the stages on class b behind those on class a; and the same of the last one
        on the trunk."""
        before, (messages_s, latest_s) = self._behind[b].before, self._links[a, b]
        latest, latest_again, compute_s, again_s, trunk_s, on = self._figures[b]
        spent, trunk = ahead[:, 0][:, before], ahead[:, 1][:, before]
        self._work.add(8 * spent.size)
        begin = np.maximum(np.maximum(spent + messages_s, trunk + trunk_s), 0.0)
        after = begin + np.where(begin < latest, compute_s, np.where(begin < latest_again, again_s, NEVER))
        after[spent >= latest_s] = NEVER
        return after, np.where((on > 0) | (after >= NEVER / 2), after, trunk)

    def _ended_at_home(self, ahead: Floats) -> Bools:
        """[state]: whether the last stage may be on the device of the first, whose labels stay."""
        found = np.zeros(len(ahead), dtype=bool)
        last = self._of.figures.count - 1
        for b in (k for k in self._kinds if self._of.classes.holds[k]):
            ends = self._behind[b].end == last
            for a in self._kinds if ends.any() else ():
                found |= (self._after(ahead[:, :, a], a, b)[0][:, ends] < NEVER / 2).any(axis=1)
        return found
