"""Where a stage may end, and exactly what would cross there."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from isthmus.graph.flow import Flow
from isthmus.graph.opgraph import Ref


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
    banned = [
        (min(uses), max(uses))
        for name in written
        if len(uses := [position[c] for c in _assigned_users(flow, name, position)]) > 1
    ]
    shared = {
        op.target: (min(uses), max(uses))
        for op in flow.graph.ops
        if op.kind == "parameter"
        and any(op.requires_grad)
        and (uses := [position[c] for c in _assigned_users(flow, op.name, position)])
    }
    last_return = {ref: max(position[c] for c in names) for ref, names in flow.returning.items() if names}
    found: list[Cut] = []
    for i in range(1, len(flow.operators)):
        if any(a < i <= b for a, b in banned):
            continue
        values = tuple(ref for ref, (a, b) in spans.items() if a < i <= b)
        found.append(
            Cut(
                position=i,
                after=flow.operators[i - 1].name,
                values=values,
                gradients=tuple(r for r in values if last_return.get(r, 0) >= i),
                shared=tuple(name for name, (a, b) in shared.items() if a < i <= b),
            )
        )
    return tuple(found)


def live_spans(flow: Flow) -> dict[Ref, tuple[int, int]]:
    """For each value that a cut may send: (operator that makes it, last operator that takes it).

    A placeholder is held by the first stage that takes it, so its life starts at its first consumer; or it is held by
    the first stage of all, where that alone has the data.
    """
    position = {op.name: i for i, op in enumerate(flow.operators)}
    spans: dict[Ref, tuple[int, int]] = {}
    for op in flow.graph.ops:
        if op.kind not in ("placeholder", "operator") or op.name in flow.free:
            continue
        for index in range(len(op.outputs)):
            ref = Ref(op.name, index)
            uses = [position[c] for c in flow.consumers.get(ref, ())]
            if ref == flow.graph.count:
                uses.append(position[flow.graph.loss.op])
            if uses:
                spans[ref] = (position.get(op.name, 0 if flow.columns_first else min(uses)), max(uses))
    return spans


def _assigned_users(flow: Flow, variable: str, position: dict[str, int]) -> list[str]:
    """Operators with a position that use the variable, directly or through free operators."""
    found: list[str] = []
    todo = [variable]
    while todo:
        for consumer in flow.consumers.get(Ref(todo.pop()), ()):
            (found if consumer in position else todo).append(consumer)
    return found
