"""The least P of prefixes, by the devices that they have: whether one replica may take less than a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isthmus.verification.stage_figures import Bools, Floats, Ints
from isthmus.verification.stage_seconds import NEVER, StagesBehind, StageSeconds

CHUNK = 400_000  # entries of an array
MOST_SPARE = 5  # cuts of other replicas that are counted


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
    """Pipelines with so many micro-batches, below a limit; each is one of so many `replicas`, from fewest to most.

    Replicas sum gradients: the more cuts of others lie within a stage, the smaller are the groups that it sums. Devices
    that a replica leaves to R - 1 others have so many cuts, but for R - 1 of them. A stage asks for as many as its sums
    need below the limit, and a prefix for those of all its stages.
    """

    def __init__(
        self, of: StageSeconds, limit_s: float, count: int, work: Work, replicas: tuple[int, int] = (1, 1)
    ) -> None:
        self._of, self._limit_s, self._more, self._work = of, limit_s, count - 1, work
        question, compute_s, needs = of.question, of.compute_s[0], of.needs(count)
        self._fewest, most = replicas
        self._home_twice = question.constraints.labels_stay
        self._asked, self._sums_s = np.zeros(compute_s.shape, dtype=np.int64), np.zeros(compute_s.shape)
        self._spare = 0  # cuts of others that are counted at most
        if self._fewest > 1 and question.gradients and question.period == 1:
            self._spare = min(MOST_SPARE, self._left_cuts(1))
            sums_s = [of.sums_s(self._fewest, most, cuts) for cuts in range(self._spare)]
            self._sums_s = of.sums_s(self._fewest, most, max(self._spare, self._left_cuts(1)))
            self._asked = np.full(compute_s.shape, self._spare)
            for cuts in range(self._spare - 1, -1, -1):
                self._asked[count * compute_s + sums_s[cuts] < limit_s] = cuts
        late = count * compute_s + self._sums_s >= limit_s
        self._needs = (np.where(late, NEVER, needs[0]), np.where(late, NEVER, needs[1]))
        self._kinds = range(len(of.classes.speed))
        self._behind = [
            [of.behind((self._asking(cuts, 0), self._asking(cuts, 1)), limit_s, kind) for kind in self._kinds]
            for cuts in range(self._spare + 1)
        ]
        self._figures = [[self._of_stages(kind, some[kind]) for kind in self._kinds] for some in self._behind]
        self._links = [
            {(a, b): self._of_link(a, b, some[b]) for a in self._kinds for b in self._kinds} for some in self._behind
        ]

    def _left_cuts(self, used: int) -> int:
        """Cuts that others have on the devices that a replica with so many leaves."""
        more = self._fewest - 1 if self._home_twice else 0
        return max(0, len(self._of.question.fleet.names) - used - (self._fewest - 1) + more)

    def _asking(self, cuts: int, again: int) -> Floats:
        return np.where(self._asked == cuts, self._needs[again], NEVER)

    def _of_stages(self, kind: int, stages: StagesBehind) -> tuple[Floats, ...]:
        """Latest beginnings and seconds without and with recomputing, the trunk's message, and whether it is on it."""
        of = self._of
        at = kind, stages.begin, stages.end
        latest = [self._limit_s - need[at] for need in self._needs]
        compute = [each[at] for each in of.compute_s]
        on = of.figures.on_trunk[stages.begin, stages.end]
        latency_s = (of.classes.latency_s[kind] + of.classes.latency_s[:, kind]).min()
        behind = np.where(of.figures.behind_trunk[stages.begin, stages.end], latency_s, -NEVER)
        trunk_s = np.where(on, np.maximum(of.trunk_s[kind, stages.begin], behind), behind)
        if self._home_twice and of.classes.holds[kind]:  # the last stage may be on the device of the first
            trunk_s = np.where(stages.end == of.figures.count - 1, np.minimum(trunk_s, 0.0), trunk_s)
        return latest[0], latest[1], compute[0], compute[1], trunk_s, on.astype(np.float64)

    def _of_link(self, a: int, b: int, stages: StagesBehind) -> tuple[Floats, Floats]:
        """Seconds of messages where a stage on b waits for one on a, and up to when it may begin to for the link."""
        of, sent = self._of, self._of.figures.messages
        begins = of.ends[2][stages.before]
        there, back = (x[begins, stages.begin, stages.end] for x in sent[:2])
        byte_s, back_s = of.classes.byte_s[a, b], of.classes.byte_s[b, a]
        linked = sent.linked[begins, stages.begin, stages.end]
        busy_s = np.maximum(there * byte_s, back * back_s)
        messages_s = of.classes.latency_s[a, b] + of.classes.latency_s[b, a] + there * byte_s + back * back_s
        latest_s = self._limit_s - messages_s - of.compute_s[0][b, stages.begin, stages.end] - self._more * busy_s
        return np.where(linked, messages_s, -NEVER), np.where(linked, latest_s, NEVER / 2)

    def run(self) -> Bools:
        """[state]: whether such a replica may be on exactly these devices."""
        of, width = self._of, self._spare + 1
        states, counts, strides = of.classes.state_counts, of.classes.counts, of.classes.strides
        done, shape = of.ends[0][-1][0], (2, len(self._kinds), len(of.ends[1]))
        possible = np.zeros(len(states), dtype=bool)
        begun = {k: self._first(k) for k in self._kinds if of.classes.holds[k]}
        numbers = np.array(sorted({int(strides[k]) * width + cuts for k in begun for cuts in range(width)}))
        ahead = np.full((len(numbers), *shape), NEVER)  # a number: a state, and the cuts that its stages ask for
        for kind, found in begun.items():
            for cuts in range(width):
                ahead[np.searchsorted(numbers, int(strides[kind]) * width + cuts), :, kind] = found[cuts]
        for used in range(1, int(states.sum(axis=1).max(initial=0)) + 1):
            some = (ahead[:, 0] < NEVER / 2).any(axis=(1, 2)) & (numbers % width <= self._left_cuts(used))
            numbers, ahead = numbers[some], ahead[some]
            if not len(numbers):
                break
            possible[numbers[(ahead[:, 0, :, done] < NEVER / 2).any(axis=1)] // width] = True
            if of.labels_from is not None:
                possible[numbers[self._ended_at_home(ahead)] // width] = True
            free = states[numbers // width] < counts
            numbers, ahead = self._longer(numbers, ahead, free, strides)
        return possible

    def _longer(self, numbers: Ints, ahead: Floats, free: Bools, strides: Ints) -> tuple[Ints, Floats]:
        """One stage more, on a device of each class that is `free`."""
        width = self._spare + 1
        ways = [(kind, cuts) for kind in self._kinds for cuts in range(width) if len(self._behind[cuts][kind].before)]
        into = {
            (kind, cuts): numbers + int(strides[kind]) * width + np.minimum(cuts, self._spare - numbers % width)
            for kind, cuts in ways
        }
        every = [into[kind, cuts][free[:, kind]] for kind, cuts in ways]
        targets = np.unique(np.concatenate(every)) if every else np.zeros(0, dtype=np.int64)
        grown = np.full((len(targets), *ahead.shape[1:]), NEVER)
        for kind, cuts in ways:
            for a in self._kinds:
                chosen = np.flatnonzero(free[:, kind] & (ahead[:, 0, a] < NEVER / 2).any(axis=1))
                at = np.searchsorted(targets, into[kind, cuts][chosen])
                order = np.argsort(at, kind="stable")
                self._follow(ahead, chosen[order], grown, at[order], a, (kind, cuts))
        return targets, grown

    def _first(self, kind: int) -> Floats:
        """[cuts, 2, row]: stages that begin the model, by the cuts that they ask for."""
        of, rows = self._of, self._of.ends[0]
        found = np.full((self._spare + 1, 2, len(of.ends[1])), NEVER)
        for end in range(1, of.figures.count):
            plain, again = (need[kind, 0, end] < self._limit_s for need in self._needs)
            if plain or again:
                at = found[self._asked[kind, 0, end], :, rows[end][0]]
                at[0] = of.compute_s[0 if plain else 1][kind, 0, end] + self._sums_s[kind, 0, end]
                at[1] = at[0] if of.figures.on_trunk[0, end] else 0.0
        return found

    def _follow(self, ahead: Floats, chosen: Ints, grown: Floats, into: Ints, a: int, way: tuple[int, int]) -> None:
        kind, cuts = way
        stages = self._behind[cuts][kind]
        step = max(1, CHUNK // len(stages.before))
        for k in range(0, len(chosen), step):
            rows, targets = chosen[k : k + step], into[k : k + step]
            once = np.flatnonzero(np.diff(targets, prepend=-1))  # some prefixes become the same, as of counted cuts
            for number, found in enumerate(self._after(ahead[rows, :, a], a, way)):
                least = np.minimum.reduceat(np.minimum.reduceat(found, stages.starts, axis=1), once, axis=0)
                at = targets[once][:, None], number, kind, stages.into[None]
                grown[at] = np.minimum(grown[at], least)

    def _after(self, ahead: Floats, a: int, way: tuple[int, int]) -> tuple[Floats, Floats]:
        """[number, stage]: P and compute of the stages on a class that ask for so many cuts, behind those on class a;
        and the same of the last one on the trunk."""
        kind, cuts = way
        before, (messages_s, latest_s) = self._behind[cuts][kind].before, self._links[cuts][a, kind]
        latest, latest_again, compute_s, again_s, trunk_s, on = self._figures[cuts][kind]
        spent, trunk = ahead[:, 0][:, before], ahead[:, 1][:, before]
        self._work.add(8 * spent.size)
        begin = np.maximum(np.maximum(spent + messages_s, trunk + trunk_s), 0.0)
        after = begin + np.where(begin < latest, compute_s, np.where(begin < latest_again, again_s, NEVER))
        after[spent >= latest_s] = NEVER
        return after, np.where((on > 0) | (after >= NEVER / 2), after, trunk)

    def _ended_at_home(self, ahead: Floats) -> Bools:
        """[state]: whether the last stage may be on the device of the first, whose labels stay."""
        found, last = np.zeros(len(ahead), dtype=bool), self._of.figures.count - 1
        for cuts, some in enumerate(self._behind):
            for kind in (k for k in self._kinds if self._of.classes.holds[k]):
                ends = some[kind].end == last
                for a in self._kinds if ends.any() else ():
                    after = self._after(ahead[:, :, a], a, (kind, cuts))[0]
                    found |= (after[:, ends] < NEVER / 2).any(axis=1)
        return found
