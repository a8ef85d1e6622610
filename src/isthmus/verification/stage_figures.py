"""The least that a stage computes, keeps, sends and receives, by the cells in which it begins and ends.

A cell is a run of neighbouring places to cut between which operators compute next to nothing: in captured models most
operators are views and sums between two products of matrices. A stage from cell a to cell c has at least the operators
from the last place of a to the first place of c. A cell of one place is exact.

A trunk is a longest path of operators along which gradients come back. A stage with an operator of it waits for all
stages with earlier ones, and these wait for its gradient.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.verification.packing import wire_bytes
from isthmus.verification.reading import GraphReading, GraphValue

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Messages(NamedTuple):
    """[cell where the sender begins, cell between both, cell where the receiver ends]: bytes for a micro-batch."""

    there: Floats
    back: Floats
    linked: Bools  # whether the receiver certainly waits for the sender, and the sender for a gradient


class StageFigures:
    """Arrays are [cell where a stage begins, cell where it ends], of one micro-batch."""

    def __init__(self, reading: GraphReading, most_cells: int) -> None:
        self.reading = reading
        self.edges = (0, *reading.places, len(reading.operators))
        self._work = np.array([sum(pair) for pair in zip(*reading.work, strict=True)], dtype=np.float64)
        self._members = self._joined(most_cells)
        self.first = np.array([cell[0] for cell in self._members])
        self.last = np.array([cell[-1] for cell in self._members])
        self.count = len(self._members)
        begins, ends = np.arange(self.count)[:, None], np.arange(self.count)[None, :]
        self.allowed: Bools = (begins < ends) | ((begins == ends) & (self.first < self.last)[:, None])

    def _joined(self, most: int) -> list[list[int]]:
        """Cells of places, the ends of the model alone; as few operations within a cell as so many cells allow."""
        places, total = self.edges[1:-1], max(float(self._work[-1]), 1.0)

        def cells(within: float) -> list[list[int]]:
            found: list[list[int]] = []
            for place in places:
                if found and self._work[place] - self._work[found[-1][0]] <= within:
                    found[-1].append(place)
                else:
                    found.append([place])
            return found

        low, high = 0.0, total
        if len(found := cells(low)) + 2 > most:
            for _ in range(24):
                middle = (low + high) / 2
                low, high = (middle, high) if len(cells(middle)) + 2 > most else (low, middle)
            found = cells(high)
        return [[0], *found, [self.edges[-1]]]

    def _between(self, amounts: Sequence[int]) -> Floats:
        """Sums over the operators that such stages have at least, of amounts that are summed up by position."""
        summed = np.array(amounts, dtype=np.float64)
        return np.maximum(summed[self.first][None, :] - summed[self.last][:, None], 0.0)

    @cached_property
    def work(self) -> Floats:
        """FLOPs, both ways; none of a stage that may be steps ahead."""
        return self._between([int(x) for x in self._work]) * self._in_step

    @cached_property
    def forward(self) -> Floats:
        return self._between(self.reading.work[0]) * self._in_step

    @cached_property
    def _in_step(self) -> Bools:
        """Whether such a stage certainly waits for a gradient, and so for each update."""
        return self._between(self.reading.learning) > 0

    @cached_property
    def saved(self) -> Floats:
        return self._between(self.reading.kept)

    def _used(self, uses: Sequence[Sequence[int]], amounts: Sequence[float], owned: bool = False) -> Floats:
        """The amounts of what such stages use; `owned`: of what they use first."""
        found = np.zeros((self.count, self.count + 1))
        for cell, begin in enumerate(self.last):
            for positions, amount in zip(uses, amounts, strict=True):
                after = bisect.bisect_left(positions, begin)
                if after < len(positions) and not (owned and after):
                    found[cell, bisect.bisect_right(self.first, positions[after])] += amount
        return np.cumsum(found, axis=1)[:, :-1]

    @cached_property
    def received(self) -> Floats:
        """Bytes that are kept of what earlier stages sent."""
        values, found = self.reading.values, np.zeros((self.count, self.count + 1))
        for cell, (begin, at_least) in enumerate(zip(self.last, self.first, strict=True)):
            for value in values:
                after = bisect.bisect_left(value.uses, begin)
                if value.made < at_least and after < len(value.uses):
                    found[cell, bisect.bisect_right(self.first, value.uses[after])] += value.size_bytes
        return np.cumsum(found, axis=1)[:, :-1]

    @cached_property
    def columns(self) -> Floats:
        columns = [value for value in self.reading.values if value.column]
        return self._used([(v.made,) for v in columns], [v.size_bytes for v in columns], owned=True)

    @cached_property
    def state(self) -> Floats:
        """Bytes of weights, gradients and optimizer."""
        state, known = self.reading.question.state, self.reading.variables
        uses = [v.uses for v in known]
        held = [v.size_bytes + (v.elements * state.gradient if v.trained else 0) for v in known]
        own = [v.elements * (state.master + state.optimizer) if v.trained else 0 for v in known]
        return self._used(uses, held) + self._used(uses, own, owned=True)

    @cached_property
    def working(self) -> Floats:
        """Bytes of the operator that takes most while it runs."""
        found = np.zeros((self.count, self.count))
        for cell, begin in enumerate(self.last):
            most = np.maximum.accumulate([0, *self.reading.at_work[begin:]])
            found[cell] = most[np.maximum(self.first - begin, 0)]
        return found

    def summed(self, parts: int) -> Floats:
        """Elements of parameters that such a stage updates, of those that have so many elements at least."""
        trained = [v for v in self.reading.variables if v.trained and v.elements >= parts]
        return self._used([v.uses for v in trained], [v.elements for v in trained], owned=True)

    @cached_property
    def _trunk(self) -> tuple[list[int], list[int]]:
        """Positions, and the bytes that each sends the next."""
        longest = {0: (1, -1, 0)}  # operators up to this one, the one before it, and the bytes between them
        for value in sorted(self.reading.values, key=lambda value: value.made):
            length = longest.get(value.made, (1, -1, 0))[0] + 1
            for user in value.returns:
                if length > longest.get(user, (1, -1, 0))[0]:
                    longest[user] = length, value.made, wire_bytes(self.reading.question, value)
        at = max(longest, key=lambda position: longest[position][0])
        path, sizes = list[int](), list[int]()
        while at >= 0:
            path.append(at)
            _, at, size_bytes = longest.get(at, (1, -1, 0))
            sizes.append(size_bytes)
        return path[::-1], sizes[::-1][1:]

    @cached_property
    def on_trunk(self) -> Bools:
        path = self._trunk[0]
        before = [bisect.bisect_left(path, position) for position in range(self.edges[-1] + 1)]
        return self._between(before) > 0

    @cached_property
    def behind_trunk(self) -> Bools:
        """Whether such a stage certainly waits for the last stage before it that is on the trunk, and that for it."""
        path = self._trunk[0]
        users: dict[int, set[int]] = {}
        for value in self.reading.values:
            users.setdefault(value.made, set()).update(value.returns)
        from_place = np.full(self.count, self.edges[-1])
        for cell, places in enumerate(self._members[1:-1], 1):
            firsts = list[int]()
            for place in places:
                ahead = bisect.bisect_left(path, place)
                reached = {path[ahead - 1]} if ahead else set[int]()
                behind = (
                    path[ahead] if ahead < len(path) else self.edges[-1]
                )  # the trunk reaches this one at the latest
                for made in range(path[ahead - 1], behind) if ahead else ():
                    if made in reached:
                        reached |= users.get(made, set())
                firsts.append(min((at for at in reached if at >= place), default=self.edges[-1]))
            from_place[cell] = max(firsts)
        return self.first[None, :] > from_place[:, None]

    @cached_property
    def trunk_bytes(self) -> Floats:
        """[cell]: bytes that cross it along the trunk, each way."""
        path, sizes = self._trunk
        found = np.zeros(self.count)
        for cell, places in enumerate(self._members):
            ahead = [bisect.bisect_left(path, place) for place in places]
            found[cell] = min(sizes[k - 1] if 0 < k < len(path) else 0 for k in ahead)
        return found

    def _crossing(self) -> Iterator[tuple[int, int, list[tuple[GraphValue, int, int]]]]:
        """Each place to cut with its cell, and the values that cross it, their bytes and the cell that makes them."""
        values = sorted(self.reading.values, key=lambda value: value.made, reverse=True)
        here = list[tuple[GraphValue, int, int]]()
        for cell, places in enumerate(self._members[1:-1], 1):
            for place in places:
                while values and values[-1].made < place:
                    value = values.pop()
                    made_in = bisect.bisect_right(self.last, value.made) - 1
                    here.append((value, wire_bytes(self.reading.question, value), made_in))
                here = [one for one in here if max((*one[0].uses, *one[0].returns), default=-1) >= place]
                yield cell, place, here

    @cached_property
    def messages(self) -> Messages:
        count = self.count
        there, back = (np.full((count, count, count), np.inf) for _ in range(2))
        linked = np.ones((count, count, count), dtype=bool)
        for cell, place, values in self._crossing():
            sent = np.zeros((2, count, count + 1))
            for value, size_bytes, made_in in values:
                for way, positions in enumerate((value.uses, value.returns)):
                    after = bisect.bisect_left(positions, place)
                    if after < len(positions):
                        sent[way, made_in, bisect.bisect_right(self.first, positions[after])] += size_bytes
            summed = np.cumsum(np.cumsum(sent[:, ::-1], axis=1)[:, ::-1], axis=2)[:, :, :-1]
            there[:, cell] = np.minimum(there[:, cell], summed[0])
            back[:, cell] = np.minimum(back[:, cell], summed[1])
            linked[:, cell] &= (summed[0] > 0) & (summed[1] > 0)
        return Messages(there, back, linked)
