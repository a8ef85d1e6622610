"""Whether any pipeline, or any several that share a batch, may take less than a limit: a dynamic programme.

With P the compute and messages, both ways, of all stages before stage s on the way of a micro-batch to it, no step is
shorter than

    P + n * C[s],    P + ceil(n / held[s]) * trip[s],    P + message + C[s] + (n - 1) * bytes / bandwidth for a link

Below a limit a prefix is better the less its P is, whatever follows: for each choice of devices (how many of each
class), last device and last cuts it is enough to know the least P. What a micro-batch does next is bounded from below
where it is not known: `trip` has the least that operators behind the stage take anywhere.

P is a sum along one way: from each stage to the next if that certainly waits for it, else along the trunk
(`stage_figures`), else it begins anew with 0. Every stage of a way ends each step between its own beginning of it and
that of the next, so what holds from its beginning to the next one bounds a step in the long run.

Several replicas, of n micro-batches together: for each number of micro-batches the same programme tells on which
devices one replica may have so many, and a second one how many disjoint sets of devices have together. Sums of two
replicas or more take two messages at least after a stage's last backward, of one part in R of a group of its gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from isthmus.verification.copies import Copies
from isthmus.verification.prefixes import Prefixes, Work
from isthmus.verification.reading import GraphReading
from isthmus.verification.stage_figures import Bools, Floats
from isthmus.verification.stage_seconds import Relaxation, StageSeconds

ROUNDING = 1e-9
FEW, FEW_COPIES = 4, 16  # replicas up to which each number is looked at by itself, and of one device each
MOST_COUNTS = 31  # numbers of micro-batches of one of several replicas that are distinguished


class Decision:
    """One number of micro-batches of the question."""

    def __init__(self, reading: GraphReading, relaxation: Relaxation) -> None:
        self.question = reading.question
        self._seconds = StageSeconds(reading, relaxation)
        self.figures, self.classes = self._seconds.figures, self._seconds.classes
        self._states, self._sizes = self.classes.state_counts, np.array([len(own) for own in self.classes.members])
        self.whole_flops = float(reading.lasting_flops)

    def below(self, limit_s: float, work: Work) -> bool:
        """Whether some plan may take less, by what is distinguished."""
        if self.whole_flops * self.question.micro_batches > self._capacity(limit_s):
            return False
        if self._possible(limit_s, self.question.micro_batches, work, (1, 1)).any():
            return True
        if any(self._copies.below(limit_s, *replicas) for replicas in self._ranges(FEW_COPIES)):
            return True
        return any(self._together(limit_s, work, replicas, any_will_do=True)[1].any() for replicas in self._ranges(FEW))

    def rates(self, of_device: Mapping[str, float]) -> Floats:
        """[class]: the least of its devices."""
        return np.array([min(of_device[name] for name in own) for own in self.classes.members])

    def least_rate(self, limit_s: float, rate: Floats, work: Work) -> float:
        """Return the least price per second of the devices of a plan that takes less, by `rate` of a device of each
        class; infinite where there is none."""
        possible = self._possible(limit_s, self.question.micro_batches, work, (1, 1))
        for replicas in self._ranges(FEW):
            possible |= self._together(limit_s, work, replicas).any(axis=0)
        return float((self._states[possible] @ rate).min(initial=np.inf))

    def _capacity(self, limit_s: float) -> float:
        return limit_s * float(self.classes.speed @ self._sizes) * (1 + ROUNDING)

    @cached_property
    def _most_replicas(self) -> int:
        if self._seconds.figures.reading.one_only:
            return 1
        devices, need = int(self._sizes.sum()), float(self.figures.state[0, -1])
        room = int(self.classes.room @ self._sizes // need) if need else devices
        return min(devices, self.question.micro_batches, room)

    def _ranges(self, few: int) -> list[tuple[int, int]]:
        """Numbers of replicas that are looked at together; up to a few each by itself."""
        ends = [*range(2, few + 1)]
        while ends[-1] <= self._most_replicas:
            ends.append(ends[-1] + max(1, ends[-1] // 2))
        return [(a, min(b - 1, self._most_replicas)) for a, b in itertools.pairwise(ends) if a <= self._most_replicas]

    def _together(self, limit_s: float, work: Work, replicas: tuple[int, int], *, any_will_do: bool = False) -> Bools:
        """[divided, state]: whether so many replicas, from fewest to most, may complete the batch on these devices;
        divided: one of them has two stages or more. `any_will_do` ends with the first divided ones."""
        batch = self.question.micro_batches
        enough = np.zeros((2, len(self._states)), dtype=bool)
        first = -(-batch // replicas[1])  # one has so many
        possible = {first: self._possible(limit_s, first, work, replicas)}
        if not possible[first].any():
            return enough
        capacity = limit_s * (1 + ROUNDING) * (self._states @ self.classes.speed) / max(self.whole_flops, 1.0)
        completed = np.minimum(np.floor(capacity), batch - 1)
        for counts in _finer(batch):
            for count in counts:
                if count not in possible:
                    possible[count] = self._possible(limit_s, count, work, replicas)
                never = ~possible[count]
                completed[never] = np.minimum(completed[never], count - 1)
            enough = self._enough(completed, work, replicas, any_will_do)
            if not enough.any():
                break
        return enough

    def _enough(self, completed: Floats, work: Work, replicas: tuple[int, int], any_will_do: bool) -> Bools:
        """The same, if devices of a state complete at most so many micro-batches as one replica."""
        batch, chosen = self.question.micro_batches, np.flatnonzero(completed > 0)
        several = self._states[chosen].sum(axis=1) > 1
        found = np.zeros((2, len(self._states)))
        found[0, chosen[~several]], found[1, chosen[several]] = completed[chosen[~several]], completed[chosen[several]]
        enough = np.zeros(found.shape, dtype=bool)
        for number in range(2, replicas[1] + 1):
            more = np.zeros_like(found)
            for state, apart in zip(chosen.tolist(), several.tolist(), strict=True):
                index = np.flatnonzero((self._states >= self._states[state]).all(axis=1))
                before = found[:, index - state]
                after = np.where(before > 0, before + completed[state], 0.0)
                after = np.stack([np.zeros(len(index)), after.max(axis=0)]) if apart else after
                more[:, index] = np.maximum(more[:, index], after)
                work.add(4 * len(self._states))
            found = more
            if number >= replicas[0]:
                enough |= found >= batch
            if not found.any() or (any_will_do and enough[1].any()):
                break
        return enough

    @cached_property
    def _copies(self) -> Copies:
        return Copies(self.figures)

    def _possible(self, limit_s: float, count: int, work: Work, replicas: tuple[int, int]) -> Bools:
        """[state]: whether one of so many replicas, with so many micro-batches, may be on exactly these devices."""
        return Prefixes(self._seconds, limit_s, count, work, replicas).run()


def _finer(batch: int) -> list[list[int]]:
    """Numbers of micro-batches that one of several replicas may have, each list between those before it."""
    found, known = list[list[int]](), {0, batch}
    parts = 2
    while len(known) < batch + 1 and len(known) + parts // 2 <= MOST_COUNTS + 2:
        found.append(sorted({round(batch * k / parts) for k in range(1, parts, 2)} - known))
        known.update(found[-1])
        parts *= 2
    return found
