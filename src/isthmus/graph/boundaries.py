"""A graph that names what another cut of it would send: so a step can be compared across cuts.

For each value and each stage that takes it under that cut, an operator that returns its input stands between the value
and the stage's uses. Its result is what the stage receives, and the gradient of its result what the stage sends back.
Every other value and every sum keeps its bits, for any number of uses: autograd visits these operators as late as a
pipeline adds what stages return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from isthmus.graph.cuts import Flow
from isthmus.graph.opgraph import Arg, ArgList, Op, OpGraph, Ref
from isthmus.graph.partition import Crossing, StageGraph

WATCHED = "watched "  # prefix of the names of outputs that are watched


def watched_name(crossing: Crossing) -> str:
    return f"{WATCHED}{crossing.target} {crossing.value.op}:{crossing.value.index}"


def watched_node(name: str, parcel: str) -> str:
    """Return how what is seen of a watched output is reported."""
    return f"{parcel} {name}"


def with_boundaries(flow: Flow, stages: Sequence[StageGraph]) -> OpGraph:
    """The graph, with the values that cross between these stages of it as outputs."""
    graph, cut = flow.graph, {op.name for op in flow.operators}
    stage_of = {op.name: stage.index for stage in stages for op in stage.ops if op.name in cut}
    first = {stage: name for name, stage in reversed(stage_of.items())}  # the operator of each stage that runs first
    crossings = [c for stage in stages for c in stage.receives]
    made: dict[int, dict[Ref, Op]] = {stage.index: {} for stage in stages}
    for number, c in enumerate(crossings):
        made[c.target][c.value] = _same(f"watched_{number}", flow.by_name[c.value.op], c)
    ops: list[Op] = []
    for op in graph.ops:
        stage = stage_of.get(op.name, -1)
        if stage >= 0 and first[stage] == op.name:
            ops += made[stage].values()
        ops.append(taking(op, {ref: Ref(made[stage][ref].name) for ref in made.get(stage, {})}))
    outputs = {watched_name(c): Ref(made[c.target][c.value].name) for c in crossings}
    return msgspec.structs.replace(graph, ops=tuple(ops), outputs={**graph.outputs, **outputs})


def _same(name: str, source: Op, crossing: Crossing) -> Op:
    """To expand to the same size is the identity, there and back: -1 stands for each size."""
    flags, sizes = source.requires_grad, ArgList(tuple(-1 for _ in crossing.spec.shape))
    return Op(
        name=name,
        kind="operator",
        target="aten.expand.default",
        args=(crossing.value, sizes),
        outputs=(crossing.spec,),
        requires_grad=(bool(flags) and flags[crossing.value.index],),
    )


def taking(op: Op, others: Mapping[Ref, Ref]) -> Op:
    """The operator with other values in place of some that it takes."""
    if not others:
        return op
    kwargs = {name: _replaced(arg, others) for name, arg in op.kwargs.items()}
    return msgspec.structs.replace(op, args=tuple(_replaced(a, others) for a in op.args), kwargs=kwargs)


def _replaced(arg: Arg, others: Mapping[Ref, Ref]) -> Arg:
    if isinstance(arg, ArgList):
        return ArgList(tuple(_replaced(item, others) for item in arg.items))
    return others.get(arg, arg) if isinstance(arg, Ref) else arg
