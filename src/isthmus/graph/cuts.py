"""Flows of values in an `OpGraph`, places where a stage may end, values that cross there, and labels that must stay."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TypeVar

import msgspec

from isthmus.graph.opgraph import Op, OpGraph, Ref, TensorSpec

KeyT = TypeVar("KeyT")


class Flow:
    """Derived facts about one graph, computed once."""

    def __init__(self, graph: OpGraph, *, columns_first: bool = False) -> None:
        """`columns_first`: the first stage reads all columns of the batch and sends them on, because only its device
        has the data. Otherwise each column is read by the first stage that takes it."""
        self.graph = graph
        self.columns_first = columns_first
        self.by_name: dict[str, Op] = {op.name: op for op in graph.ops}

    @cached_property
    def taken(self) -> dict[str, tuple[Ref, ...]]:
        """The values that each op takes, each once."""
        return {op.name: tuple(dict.fromkeys(op.refs())) for op in self.graph.ops}

    @cached_property
    def values(self) -> tuple[tuple[Ref, TensorSpec, tuple[str, ...]], ...]:
        """Each value that a cut may send, and the operators that take it, in order. The loss takes the count."""
        found: list[tuple[Ref, TensorSpec, tuple[str, ...]]] = []
        for op in self.graph.ops:
            if op.kind not in ("placeholder", "operator") or op.name in self.free:
                continue
            for index, spec in enumerate(op.outputs):
                ref = Ref(op.name, index)
                takers = (*self.consumers.get(ref, ()), *([self.graph.loss.op] if ref == self.graph.count else ()))
                if takers:
                    found.append((ref, spec, takers))
        return tuple(found)

    @cached_property
    def consumers(self) -> dict[Ref, list[str]]:
        """For each value, the names of the operators that take it, in order."""
        found: dict[Ref, list[str]] = {}
        for op in self.graph.ops:
            for ref in self.taken[op.name]:
                found.setdefault(ref, []).append(op.name)
        return found

    @cached_property
    def free(self) -> frozenset[str]:
        """Operators that depend on no input and on no trainable or mutable variable: masks, positions.

        Every stage that needs one computes it again, so it is never sent and never cut.
        """
        written = {name for op in self.graph.ops for name in op.mutates}
        free: set[str] = set()
        for op in self.graph.ops:
            if (
                op.kind == "operator"
                and not op.mutates
                and all(ref.op in free or self._constant(self.by_name[ref.op], written) for ref in op.refs())
            ):
                free.add(op.name)
        return frozenset(free)

    @staticmethod
    def _constant(op: Op, written: set[str]) -> bool:
        return op.kind not in ("placeholder", "operator") and op.name not in written and not op.learns

    @cached_property
    def operators(self) -> tuple[Op, ...]:
        """The operators that a cut assigns to stages, in execution order."""
        return tuple(op for op in self.graph.ops if op.kind == "operator" and op.name not in self.free)

    @cached_property
    def differentiable(self) -> frozenset[Ref]:
        """Values through which a gradient flows back from the loss."""
        if self.graph.mode == "eval":
            return frozenset()
        due: set[Ref] = {self.graph.loss}
        for op in reversed(self.graph.ops):
            if any(Ref(op.name, i) in due for i in range(len(op.outputs))):
                due.update(ref for ref in op.refs() if self.by_name[ref.op].requires_grad[ref.index])
        return frozenset(r for r in due if self.by_name[r.op].requires_grad[r.index])

    @cached_property
    def returning(self) -> dict[Ref, list[str]]:
        """For each value, the operators that send a gradient back to it: a comparison or a detach does not."""
        found: dict[Ref, list[str]] = {}
        for ref, names in self.consumers.items():
            if ref in self.differentiable:
                found[ref] = [n for n in names if self._sends_back(self.by_name[n])]
        return found

    def _sends_back(self, op: Op) -> bool:
        return any(Ref(op.name, i) in self.differentiable for i in range(len(op.outputs)))


class Cut(msgspec.Struct, frozen=True):
    """A place between operators `position - 1` and `position` of `flow.operators`.

    `values` cross forward once per micro-batch, `gradients` (a subset) backward. `shared` are trainable
    parameters used on both sides: they cross once per step, and their gradients come back once.
    """

    position: int
    after: str
    values: tuple[Ref, ...]
    gradients: tuple[Ref, ...]
    shared: tuple[str, ...]

    def forward_bytes(self, flow: Flow, batch: int) -> int:
        return sum(flow.by_name[r.op].outputs[r.index].nbytes(batch) for r in self.values)

    def backward_bytes(self, flow: Flow, batch: int) -> int:
        return sum(flow.by_name[r.op].outputs[r.index].nbytes(batch) for r in self.gradients)


@lru_cache(maxsize=8)  # planners ask again for every part of a fleet that they look at
def cuts(flow: Flow) -> tuple[Cut, ...]:
    """Every place where a stage may end, in order. Places inside the life of a written buffer are left out."""
    position = {op.name: i for i, op in enumerate(flow.operators)}
    spans = live_spans(flow)
    written = {name for op in flow.graph.ops for name in op.mutates}
    banned = [(min(uses), max(uses)) for name in written if len(uses := users_of(flow, name, position)) > 1]
    shared = {
        op.target: (min(uses), max(uses))
        for op in flow.graph.ops
        if op.kind == "parameter" and any(op.requires_grad) and (uses := users_of(flow, op.name, position))
    }
    last_return = {ref: max(position[c] for c in names) for ref, names in flow.returning.items() if names}
    values, tied = _crossing(spans, len(flow.operators)), _crossing(shared, len(flow.operators))
    return tuple(
        Cut(
            position=i,
            after=flow.operators[i - 1].name,
            values=tuple(values[i]),
            gradients=tuple(r for r in values[i] if last_return.get(r, 0) >= i),
            shared=tuple(tied[i]),
        )
        for i in range(1, len(flow.operators))
        if not any(a < i <= b for a, b in banned)
    )


def _crossing(spans: Mapping[KeyT, tuple[int, int]], count: int) -> list[list[KeyT]]:
    """Keys by the places that part their spans, in their order."""
    found: list[list[KeyT]] = [[] for _ in range(count)]
    for key, (first, last) in spans.items():
        for place in range(first + 1, last + 1):
            found[place].append(key)
    return found


def live_spans(flow: Flow) -> dict[Ref, tuple[int, int]]:
    """For each value that a cut may send: (operator that makes it, last operator that takes it).

    A placeholder is held by the first stage that takes it, so its life starts at its first consumer; or it is held by
    the first stage of all, where that alone has the data.
    """
    position = {op.name: i for i, op in enumerate(flow.operators)}
    spans: dict[Ref, tuple[int, int]] = {}
    for ref, _, takers in flow.values:
        uses = [position[taker] for taker in takers]
        spans[ref] = (position.get(ref.op, 0 if flow.columns_first else min(uses)), max(uses))
    return spans


def users_of(flow: Flow, variable: str, position: Mapping[str, int]) -> list[int]:
    """Positions of the operators that use the variable, directly or through free operators, which have none."""
    found: list[int] = []
    todo, seen = [variable], {variable}
    while todo:
        for consumer in flow.consumers.get(Ref(todo.pop()), ()):
            if consumer in position:
                found.append(position[consumer])
            elif consumer not in seen:
                seen.add(consumer)
                todo.append(consumer)
    return found


def label_columns(flow: Flow) -> tuple[str, ...]:
    """Placeholders (by op name) that meet no trainable parameter on any way to the loss: nothing is learnt from them
    but how wrong the model is. A column that the model takes as its input, too, is no label."""
    return tuple(op.name for op in flow.graph.ops if op.kind == "placeholder" and _is_label(flow, op.name))


def last_start(flow: Flow) -> int:
    """The latest position at which a last stage may start that runs the loss and all that takes labels.

    Operators before the first cut are not counted: the first stage runs them in any case.
    """
    position = {op.name: number for number, op in enumerate(flow.operators)}
    late = {name for column in label_columns(flow) for name in _downstream(flow, column)} | {flow.graph.loss.op}
    if flow.graph.count is not None:
        late.add(flow.graph.count.op)
    first_cut = min((cut.position for cut in cuts(flow)), default=0)
    return min(position[name] for name in late if position.get(name, -1) >= first_cut)


def _is_label(flow: Flow, column: str) -> bool:
    reached = _downstream(flow, column)
    return bool(reached) and not any(
        flow.by_name[ref.op].kind == "parameter" and flow.by_name[ref.op].learns
        for name in reached
        for ref in flow.by_name[name].refs()
    )


def _downstream(flow: Flow, name: str) -> set[str]:
    """Operators that take the op's outputs, directly or through others."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        op = flow.by_name[ahead.pop()]
        for index in range(len(op.outputs)):
            for taker in flow.consumers.get(Ref(op.name, index), ()):
                if taker not in found:
                    found.add(taker)
                    ahead.append(taker)
    return found
