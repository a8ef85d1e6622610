"""Which columns are labels, and where the last stage must start for labels to stay with it."""

from __future__ import annotations

from isthmus.graph.cuts import cuts
from isthmus.graph.flow import Flow
from isthmus.graph.opgraph import Ref


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
