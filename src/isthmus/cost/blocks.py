"""The operator order as blocks between the places where it may be cut, and what is alive at each of them.

Everything a cut planner needs depends only on block numbers: block k holds the operators between place k and
place k + 1; a stage is a run of blocks [a, b).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from isthmus.cost.compression import least_bytes
from isthmus.cost.kernel import Floats, Ints
from isthmus.cost.problem import FLOAT32_BYTES, Problem
from isthmus.cost.stage_costs import elements, gradient_bytes, trainable, variable_bytes
from isthmus.graph import Flow, Ref, cuts
from isthmus.graph.cuts import users_of
from isthmus.plans import CompressionConfig


class BlockItem(NamedTuple):
    """Something made in block `made_in` that other stages may need: a value, or a shared parameter (once per step)."""

    made_in: int
    uses: tuple[int, ...]  # blocks after `made_in` that take it, ascending
    held_bytes: int  # in the memory of the device that received it
    forward_bytes: int  # on the wire: where the problem's compression depends on the plan, at least
    backward_bytes: int
    per_step: bool


class Value(NamedTuple):
    """The same by positions of operators, of which `uses` has all, ascending."""

    made: int
    uses: tuple[int, ...]
    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    per_step: bool


class BlockVariable(NamedTuple):
    """A parameter, buffer or constant: its bytes in the first stage that uses it, and in every later one."""

    uses: tuple[int, ...]
    owned_bytes: int
    user_bytes: int
    gradient_bytes: int  # bytes that replicas average: float32, 0 where nothing is trained


class Blocks:
    """Blocks between `places`, which are positions in `flow.operators` where a cut is legal (default: all).

    With `recompute` every stage runs its forward twice.
    """

    def __init__(self, problem: Problem, places: Sequence[int] | None = None, *, recompute: bool = False) -> None:
        inner = legal_places(problem) if places is None else places
        self.problem = problem
        self.places: tuple[int, ...] = (0, *inner, len(problem.flow.operators))
        self.count = len(self.places) - 1
        take = np.array(self.places)
        self.work: Floats = np.array(problem.cumulative_flops, dtype=np.float64)[take]
        self.forward_work: Floats = np.array(problem.cumulative_forward_flops, dtype=np.float64)[take]
        self.saved: Floats = np.array(problem.cumulative_saved_bytes, dtype=np.float64)[take]
        """Bytes of the first k blocks, kept per micro-batch in flight, besides what is received."""
        self.once: Floats = np.zeros_like(self.saved)  # kept for the one micro-batch whose backward runs
        working = np.array([problem.working_bytes(op) for op in problem.flow.operators], dtype=np.float64)
        self._working: list[Floats] = [np.maximum.reduceat(working, take[:-1])]  # of 1, 2, 4, ... blocks from each on
        while (reach := 1 << len(self._working)) <= self.count:
            half = self._working[-1]
            self._working.append(np.maximum(half[: self.count - reach + 1], half[reach // 2 :]))
        self._position = {op.name: i for i, op in enumerate(problem.flow.operators)}
        self.recompute = recompute
        if recompute:
            self.work = self.work + self.forward_work
            self.saved, self.once = self.columns, self.saved

    def recomputing(self) -> Blocks:
        return Blocks(self.problem, self.places[1:-1], recompute=True)

    def working(self, starts: Ints, ends: Ints) -> Floats:
        """Bytes that the operators of blocks [start, end) need at most while one runs; none of an empty run."""
        count = ends - starts
        found = np.zeros(count.shape)
        for level, most in enumerate(self._working):
            here = (count >> level) == 1
            found[here] = np.maximum(most[starts[here]], most[ends[here] - (1 << level)])
        return found

    @cached_property
    def last_start(self) -> int:
        """The last boundary at which a last stage may start: labels that stay are taken by it."""
        last = self.problem.last_start
        return self.count - 1 if last is None else self.block_of(last)

    def block_of(self, position: int) -> int:
        return bisect.bisect_right(self.places, position) - 1

    def boundaries(self, cut: Sequence[int]) -> list[int]:
        """Operator positions of block boundaries."""
        return [self.places[b] for b in cut]

    @cached_property
    def items(self) -> tuple[BlockItem, ...]:
        """The values that a cut can separate from a use. The first user holds what no operator makes."""
        block = np.searchsorted(self.places, np.arange(self.places[-1]), side="right") - 1
        of_block, found = block.tolist(), list[BlockItem]()
        for value in values_of(self.problem):
            made_in = of_block[value.made]
            if of_block[value.uses[-1]] != made_in:
                later = tuple(dict.fromkeys(of_block[use] for use in value.uses if of_block[use] != made_in))
                found.append(BlockItem(made_in, later, *value[2:]))
        return tuple(found)

    @cached_property
    def owned(self) -> Floats:
        """Bytes of the variables whose first use is in the first k blocks."""
        found = np.zeros(self.count + 1)
        for variable in self.variables:
            found[variable.uses[0] + 1] += variable.owned_bytes
        return found.cumsum()

    @cached_property
    def uses(self) -> Ints:
        """[uses, 3]: of every later use of an item or a variable, the block that made it, the use before, the use."""
        found = [
            (uses[0], before, use)
            for uses in (*((i.made_in, *i.uses) for i in self.items), *(v.uses for v in self.variables))
            for before, use in itertools.pairwise(uses)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def amounts(self) -> tuple[Floats, ...]:
        """[use]: bytes held, sent forward and sent backward per micro-batch; bytes of shared parameters and of their
        gradients per step, and their number; bytes of a variable's copy."""
        found = [
            (0, 0, 0, item.forward_bytes, item.backward_bytes, 1, 0)
            if item.per_step
            else (item.held_bytes, item.forward_bytes, item.backward_bytes, 0, 0, 0, 0)
            for item in self.items
            for _ in item.uses
        ]
        found += [(0, 0, 0, 0, 0, 0, v.user_bytes) for v in self.variables for _ in v.uses[1:]]
        return tuple(np.array(found, dtype=np.float64).reshape(-1, 7).T)

    @cached_property
    def columns(self) -> Floats:
        """Bytes per micro-batch of the batch columns that stages made of the first k blocks read themselves."""
        flow, found = self.problem.flow, np.zeros(self.count + 1)
        for op in flow.graph.ops:
            uses = [self._position[c] for c in flow.consumers.get(Ref(op.name), ())] if op.kind == "placeholder" else []
            if uses:
                found[self.block_of(min(uses)) + 1] += self.problem.column_bytes[op.target]
        return found.cumsum()

    @cached_property
    def variables(self) -> tuple[BlockVariable, ...]:
        flow, found = self.problem.flow, list[BlockVariable]()
        for op in flow.graph.ops:
            if op.kind in ("parameter", "buffer", "constant"):
                # The last stage holds what nothing uses.
                uses = users_of(flow, op.name, self._position) or [len(flow.operators) - 1]
                blocks = tuple(sorted({self.block_of(u) for u in uses}))
                owned, shared_copy = (variable_bytes(self.problem, op, shared_copy=b).total for b in (False, True))
                gradient = FLOAT32_BYTES * elements(op) if trainable(op) else 0
                found.append(BlockVariable(blocks, owned, shared_copy, gradient))
        return tuple(found)

    def crossing(self, boundary: int) -> list[BlockItem]:
        """Return what may cross there."""
        return [item for item in self.items if item.made_in < boundary <= item.uses[-1]]

    @cached_property
    def live_bytes(self) -> list[int]:
        """[boundary]: bytes per micro-batch, both ways, of all that may cross there."""
        change = [0] * (self.count + 2)
        for item in self.items:
            if not item.per_step:
                change[item.made_in + 1] += item.forward_bytes + item.backward_bytes
                change[item.uses[-1] + 1] -= item.forward_bytes + item.backward_bytes
        return list(itertools.accumulate(change))


@dataclass(frozen=True)
class _Asked:
    """The part of a problem that its values depend on: they are the same for each part of its fleet."""

    flow: Flow
    micro_batch_size: int
    compression: CompressionConfig | None
    problem: Problem = field(compare=False)


def values_of(problem: Problem) -> tuple[Value, ...]:
    """Return what stages may need of others, wherever they are cut."""
    asked = problem.constraints.compression
    return _values_of(_Asked(problem.flow, problem.micro_batch_size, asked, problem))


@lru_cache(maxsize=8)
def _values_of(asked: _Asked) -> tuple[Value, ...]:
    flow, batch, least = asked.flow, asked.micro_batch_size, least_bytes(asked.problem)
    position = {op.name: i for i, op in enumerate(flow.operators)}
    found: list[Value] = []
    for op in flow.graph.ops:
        if op.kind not in ("placeholder", "operator") or op.name in flow.free:
            continue
        for index, spec in enumerate(op.outputs):
            ref = Ref(op.name, index)
            if not (uses := sorted(position[c] for c in flow.consumers.get(ref, ()))):
                continue
            held = spec.nbytes(batch)
            forward, backward = (least(spec),) * 2 if ref in flow.differentiable else (held, 0)
            made = position.get(op.name, 0 if flow.columns_first else uses[0])
            found.append(Value(made, tuple(uses), held, forward, backward, False))
    for op in filter(trainable, flow.graph.ops):
        if uses := sorted(users_of(flow, op.name, position)):
            size = op.outputs[0].nbytes(1)
            found.append(Value(uses[0], tuple(uses), size, size, gradient_bytes(op), True))
    return tuple(found)


def legal_places(problem: Problem) -> list[int]:
    """Positions of the graph's operators after which the model can be cut, in their order."""
    return [cut.position for cut in cuts(problem.flow)]


def coarse(blocks: Blocks, most: int) -> Blocks:
    """At most `most` of the cuts, spread evenly over the work: of each group the one that sends the fewest bytes."""
    if blocks.count <= most:
        return blocks
    total = blocks.work[-1] or 1.0
    best: dict[int, tuple[int, int]] = {}
    for boundary in range(1, blocks.count):
        # Half by work, half by number: cheap operators in a row still get a place.
        group = int((blocks.work[boundary] / total + boundary / blocks.count) / 2 * (most - 1))
        offer = (blocks.live_bytes[boundary], boundary)
        best[group] = min(best.get(group, offer), offer)
    places = [blocks.places[b] for _, b in sorted(best.values(), key=lambda pair: pair[1])]
    return Blocks(blocks.problem, places, recompute=blocks.recompute)


def alternatives(blocks: Blocks) -> Iterator[Blocks]:
    """The blocks, and as stages that recompute where the schedule says how many micro-batches they must hold."""
    yield blocks
    if blocks.problem.schedule == "gpipe" and blocks.problem.recompute:
        yield blocks.recomputing()
