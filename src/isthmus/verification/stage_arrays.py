"""Every stage of a model at once, as arrays: `x[start, length - 1]` is of the stage of so many blocks from `start` on.

What a stage receives comes from the stage just before (`near`) or from an earlier one (`far`). That depends on where
the stage before begins, which is known by class: in class c it made the block just before and the c nearest others
that made something which is still to be used; in the last class it is the first stage, which made all. A value of which
this is not known counts as far.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.verification.packing import wire_bytes
from isthmus.verification.question import FLOAT32_BYTES
from isthmus.verification.reading import GraphReading

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_HOMES = 2  # blocks that made something, of which classes know whether the stage before has them


@dataclass(frozen=True, kw_only=True)
class StageArrays:
    """FLOPs and bytes; those of values are for one micro-batch. Stages past the last block are never asked for."""

    blocks: int
    forward: Floats
    backward: Floats
    saved: Floats  # kept by operators for the backward
    columns: Floats
    received: Floats
    fixed: Floats  # parameters, gradients and optimizer state
    gradients: Floats  # float32, of the parameters that the stage updates: what replicas sum
    near_there: Floats  # [class, start, length - 1]; so are the next three
    near_back: Floats
    far_there: Floats
    far_back: Floats
    near_shared: Floats
    """Parameters that an earlier stage updates: once per step, there and back. So are the next three."""
    near_count: Floats
    far_shared: Floats
    far_count: Floats
    covered: Ints  # [start, length - 1]: the class of the stage for the one that begins where it ends


def stage_arrays(reading: GraphReading) -> StageArrays:
    return _Builder(reading).arrays()


class _Builder:
    def __init__(self, reading: GraphReading) -> None:
        self._reading, self._question = reading, reading.question
        self._starts = (0, *reading.places)
        self.count = len(self._starts)
        self._edges = np.array((*self._starts, len(reading.operators)))

    def _block(self, position: int) -> int:
        return bisect.bisect_right(self._starts, position) - 1

    def _blocks(self, positions: Sequence[int]) -> list[int]:
        return sorted({self._block(position) for position in positions})

    def _zeros(self) -> Floats:
        return np.zeros((self.count, self.count))

    def _span(self, cumulative: Sequence[int]) -> Floats:
        at = np.array(cumulative, dtype=np.float64)[self._edges]
        ends = np.minimum(np.arange(self.count)[:, None] + np.arange(1, self.count + 1), self.count)
        return at[ends] - at[: self.count, None]

    def arrays(self) -> StageArrays:
        received, columns = self._zeros(), self._zeros()
        homes, all_known = self._homes()
        classes = 1 + max(map(len, homes)) + (not all_known)
        near, far = np.zeros((2, 4, classes, self.count, self.count))
        for value in self._reading.values:
            home, uses, returns = self._block(value.made), self._blocks(value.uses), self._blocks(value.returns)
            wire = wire_bytes(self._question, value)
            if value.column:
                self._charge(columns, range(home + 1), home, value.size_bytes)
            for way, blocks in enumerate((uses, returns)):
                for start, use in self._next_uses(home, blocks):
                    least = [start - 1, *homes[start], home].index(home)
                    near[way, least:, start, use - start] += wire
                    far[way, :least, start, use - start] += wire
            for start, use in self._next_uses(home, uses):
                received[start, use - start] += value.size_bytes
        fixed, gradients = self._variables(homes, near, far)
        columns, received, near, far = (np.cumsum(x, axis=-1) for x in (columns, received, near, far))
        return StageArrays(
            blocks=self.count,
            forward=self._span(self._reading.work[0]),
            backward=self._span(self._reading.work[1]),
            saved=self._span(self._reading.kept),
            columns=columns,
            received=received,
            fixed=np.cumsum(fixed, axis=-1),
            gradients=np.cumsum(gradients, axis=-1),
            near_there=near[0],
            near_back=near[1],
            far_there=far[0],
            far_back=far[1],
            near_shared=near[2],
            near_count=near[3],
            far_shared=far[2],
            far_count=far[3],
            covered=self._covered(homes, classes - 1),
        )

    def _homes(self) -> tuple[list[list[int]], bool]:
        """Return for each start the nearest blocks before the one just before that made something still to be used; and
        whether these are all."""
        found: list[set[int]] = [set() for _ in range(self.count)]
        for value in self._reading.values:
            home = self._block(value.made)
            for start in range(home + 2, self._block(value.uses[-1]) + 1):
                found[start].add(home)
        for variable in self._reading.variables:
            home, *later = (self._blocks(variable.uses) if variable.trained else []) or [0]
            for start in range(home + 2, later[-1] + 1 if later else 0):
                found[start].add(home)
        nearest = [sorted(homes, reverse=True)[:MOST_HOMES] for homes in found]
        return nearest, max(map(len, found)) <= MOST_HOMES

    def _covered(self, homes: Sequence[Sequence[int]], last: int) -> Ints:
        found = np.zeros((self.count, self.count), dtype=np.int64)
        found[0] = last
        for end in range(1, self.count):
            for start in range(1, end):
                found[start, end - start - 1] = sum(home >= start for home in homes[end])
        return found

    def _next_uses(self, home: int, uses: Sequence[int]) -> list[tuple[int, int]]:
        """For every start behind the block that makes it: the first use at or behind that start."""
        found: list[tuple[int, int]] = []
        start = home + 1
        for use in uses:
            found += [(s, use) for s in range(start, use + 1)]
            start = max(start, use + 1)
        return found

    def _charge(self, table: Floats, starts: range, use: int, amount: float) -> None:
        """Stages with these starts pay as soon as they reach block `use`."""
        for start in starts:
            if start <= use:
                table[start, use - start] += amount

    def _variables(self, homes: Sequence[Sequence[int]], near: Floats, far: Floats) -> tuple[Floats, Floats]:
        """Their bytes; what of them is shared is added to the third and fourth row of `near` and `far`."""
        fixed, gradients = self._zeros(), self._zeros()
        state = self._question.state
        for v in self._reading.variables:
            uses = self._blocks(v.uses) or [self.count - 1]
            trained = v.elements if v.trained else 0
            user = v.size_bytes + trained * state.gradient
            self._charge(fixed, range(uses[0] + 1), uses[0], user + trained * (state.master + state.optimizer))
            self._charge(gradients, range(uses[0] + 1), uses[0], FLOAT32_BYTES * trained)
            for start, use in self._next_uses(uses[0], uses[1:]):
                fixed[start, use - start] += user
                least = [start - 1, *homes[start], uses[0]].index(uses[0])
                for row, amount in ((2, v.size_bytes), (3, 1)) if v.trained else ():
                    near[row, least:, start, use - start] += amount
                    far[row, :least, start, use - start] += amount
        return fixed, gradients
