"""What flows where in an `OpGraph`: consumers, gradients due, and ops that any stage can compute for itself."""

from __future__ import annotations

from functools import cached_property

from isthmus.graph.opgraph import Op, OpGraph, Ref


class Flow:
    """Derived facts about one graph, computed once."""

    def __init__(self, graph: OpGraph, *, columns_first: bool = False) -> None:
        """`columns_first`: the first stage reads all columns of the batch and sends them on, because only its device
        has the data. Otherwise each column is read by the first stage that takes it."""
        self.graph = graph
        self.columns_first = columns_first
        self.by_name: dict[str, Op] = {op.name: op for op in graph.ops}

    @cached_property
    def consumers(self) -> dict[Ref, list[str]]:
        """For each value, the names of the operators that take it, in order."""
        found: dict[Ref, list[str]] = {}
        for op in self.graph.ops:
            for ref in dict.fromkeys(op.refs()):
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
