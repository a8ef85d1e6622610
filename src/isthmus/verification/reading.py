"""An operator graph read once, by position: who makes what, who takes it, and what it weighs.

Positions number the operators that a plan assigns, in execution order. Operators that no input and nothing trained
reaches (masks, positions) have none: every stage computes its own.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from isthmus.errors import UserError
from isthmus.graph.opgraph import Op, Ref
from isthmus.verification.question import Question

SUMMED = ("float32", "bfloat16", "float16")  # parameters of these types are summed over replicas, in float32


class GraphValue(NamedTuple):
    """A tensor of each micro-batch."""

    name: str
    made: int  # position of its operator; of its first user, where it is a column of the batch
    uses: tuple[int, ...]
    returns: tuple[int, ...]  # those of the users that send a gradient back
    elements: int
    dtype: str
    size_bytes: int
    column: bool  # whether it is a column of the batch, which is read where it is first used


class GraphVariable(NamedTuple):
    """A parameter, buffer or constant."""

    op: str
    name: str  # the module's own
    uses: tuple[int, ...]  # positions, also of operators that take it through others without a position
    parameter: bool
    trained: bool
    written: bool
    dtype: str
    elements: int
    size_bytes: int


@dataclass(frozen=True)
class GraphReading:
    """Raises UserError, on first use, for a graph in which no operator has a position."""

    question: Question

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.question.graph.ops}

    @cached_property
    def operators(self) -> tuple[Op, ...]:
        ops = self.question.graph.ops
        written = {name for op in ops for name in op.mutates}
        reached: set[str] = set()
        for op in ops:
            source = op.kind == "placeholder" or bool(op.mutates)
            changes = op.name in written or op.written or _trained(op)
            if source or changes or any(ref.op in reached for ref in op.refs()):
                reached.add(op.name)
        found = tuple(op for op in ops if op.kind == "operator" and op.name in reached)
        if not found:
            raise UserError(f"graph {self.question.graph.name!r}: got no operator that an input reaches")
        return found

    @cached_property
    def position(self) -> dict[str, int]:
        return {op.name: number for number, op in enumerate(self.operators)}

    @cached_property
    def work(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(forward, backward) FLOPs of the operators before each position, for one micro-batch."""
        size = self.question.micro_batch_size
        return (
            tuple(itertools.accumulate((op.flops_forward.at(size) for op in self.operators), initial=0)),
            tuple(itertools.accumulate((op.flops_backward.at(size) for op in self.operators), initial=0)),
        )

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Bytes that the operators before each position keep until their backward, for one micro-batch."""
        size = self.question.micro_batch_size
        return tuple(itertools.accumulate((op.saved_bytes.at(size) for op in self.operators), initial=0))

    @cached_property
    def at_work(self) -> tuple[int, ...]:
        """Bytes that the operator at each position needs while it runs, besides what is kept."""
        return tuple(op.working_bytes.at(self.question.micro_batch_size) for op in self.operators)

    @cached_property
    def loss(self) -> int:
        """Position of the operator that makes the loss."""
        return self.position[self.question.graph.loss.op]

    @cached_property
    def values(self) -> tuple[GraphValue, ...]:
        """Everything that a stage could send another, in the graph's order."""
        graph, size = self.question.graph, self.question.micro_batch_size
        found: list[GraphValue] = []
        for op in graph.ops:
            if op.kind != "placeholder" and op.name not in self.position:
                continue
            for index, spec in enumerate(op.outputs):
                ref = Ref(op.name, index)
                takers = self._takers.get(ref, [])
                uses = {self.position[name] for name in takers} | ({self.loss} if ref == graph.count else set())
                if uses:
                    found.append(
                        GraphValue(
                            name=op.name if len(op.outputs) == 1 else f"{op.name}:{index}",
                            made=self.position.get(op.name, 0 if self._columns_first else min(uses)),
                            uses=tuple(sorted(uses)),
                            returns=tuple(sorted(self.position[n] for n in takers if self._sends_back(ref, n))),
                            elements=math.prod(spec.shape_at(size)),
                            dtype=spec.dtype,
                            size_bytes=spec.nbytes(size),
                            column=op.kind == "placeholder",
                        )
                    )
        return tuple(found)

    @property
    def _columns_first(self) -> bool:
        """Return whether the first stage reads all columns, because its device alone has the data."""
        return bool(self.question.constraints.data_holders)

    @cached_property
    def labels_from(self) -> int | None:
        """Where labels stay, the first position behind the first block at which they, or the loss, are taken.

        A label is a column from which no way to the loss passes a trained parameter.
        """
        if not self.question.constraints.labels_stay:
            return None
        graph = self.question.graph
        made = [graph.loss.op, *([graph.count.op] if graph.count is not None else [])]
        found = {self.position[name] for name in made if name in self.position}
        for op in graph.ops:
            if op.kind == "placeholder":
                found |= self._beyond_as_label(op.name)
        start = self.places[0] if self.places else 0
        return min(position for position in found if position >= start)

    def _beyond_as_label(self, column: str) -> set[int]:
        """Positions of all that depends on a column; none where a trained parameter is among what they take."""
        reached, touched = set[int](), {column}
        for op in self.operators:
            refs = {ref.op for ref in op.refs()}
            if refs & touched:
                touched.add(op.name)
                reached.add(self.position[op.name])
                if any(_trained(self.by_name[name]) for name in refs):
                    return set()
        return reached

    @cached_property
    def variables(self) -> tuple[GraphVariable, ...]:
        written = {name for op in self.question.graph.ops for name in op.mutates}
        return tuple(
            GraphVariable(
                op=op.name,
                name=op.target,
                uses=tuple(sorted(self._reaches[op.name])),
                parameter=op.kind == "parameter",
                trained=_trained(op),
                written=op.name in written,
                dtype=op.outputs[0].dtype,
                elements=math.prod(op.outputs[0].shape_at(1)),
                size_bytes=op.outputs[0].nbytes(1),
            )
            for op in self.question.graph.ops
            if op.kind in ("parameter", "buffer", "constant")
        )

    @cached_property
    def not_summed(self) -> str | None:
        """A trained parameter of a type that replicas do not sum."""
        return next((v.name for v in self.variables if v.trained and v.dtype not in SUMMED), None)

    @cached_property
    def learning(self) -> tuple[int, ...]:
        """How many operators before each position pass a gradient on, or take it for a parameter: a stage without one
        waits for nothing behind it, and is steps ahead."""
        own = (any(Ref(op.name, k) in self._learning for k in range(len(op.outputs))) for op in self.operators)
        return tuple(itertools.accumulate(own, initial=0))

    @cached_property
    def lasting_flops(self) -> int:
        """FLOPs for one micro-batch, both ways, that no stage does ahead of the step."""
        both = [sum(pair) for pair in zip(*self.work, strict=True)]
        counts = self.learning
        return sum((both[k + 1] - both[k]) * (counts[k + 1] - counts[k]) for k in range(len(self.operators)))

    @property
    def one_only(self) -> bool:
        """Whether no plan has several replicas."""
        question = self.question
        places = question.constraints.data_holders or question.fleet.names
        return len(places) == 1 or question.micro_batches == 1 or self.not_summed is not None

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Positions at which a stage may start: not between two users of a buffer that is written."""
        lives = [(v.uses[0], v.uses[-1]) for v in self.variables if v.written and v.uses]
        return tuple(p for p in range(1, len(self.operators)) if not any(a < p <= b for a, b in lives))

    @cached_property
    def _takers(self) -> dict[Ref, list[str]]:
        found: dict[Ref, list[str]] = {}
        for op in self.operators:
            for ref in set(op.refs()):
                found.setdefault(ref, []).append(op.name)
        return found

    @cached_property
    def _reaches(self) -> dict[str, set[int]]:
        """For each op, the positions of its users; an op without a position passes on its own users'."""
        graph = self.question.graph
        found: dict[str, set[int]] = {op.name: set() for op in graph.ops}
        if graph.count is not None:
            found[graph.count.op].add(self.loss)
        for op in reversed(graph.ops):
            own = {self.position[op.name]} if op.name in self.position else found[op.name]
            for ref in op.refs():
                found[ref.op] |= own
        return found

    @cached_property
    def _learning(self) -> frozenset[Ref]:
        """Values that the loss sends a gradient to: walked backwards from it."""
        found: set[Ref] = set()
        ahead = [self.question.graph.loss]
        while ahead:
            ref = ahead.pop()
            if ref not in found and self.by_name[ref.op].requires_grad[ref.index]:
                found.add(ref)
                ahead += self.by_name[ref.op].refs()
        return frozenset(found)

    def _sends_back(self, ref: Ref, taker: str) -> bool:
        outputs = range(len(self.by_name[taker].outputs))
        return ref in self._learning and any(Ref(taker, index) in self._learning for index in outputs)


def _trained(op: Op) -> bool:
    return op.kind == "parameter" and any(op.requires_grad)
