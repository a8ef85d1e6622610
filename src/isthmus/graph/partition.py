"""Cut a graph into stages: what each runs, what it requires and sends, in FP and in BP; and the same cut in the eval
graph.

These are FusionLLM's sub-DAG tables. A value that stages s < t < u use is sent by s to t and to u, each over
its own edge; nothing is relayed.

The train graph and the eval graph of a model list nearly the same operators in the same order: dropout becomes the
identity, batch norm reads its running statistics, a module may add or leave out a branch. An eval operator goes where
its train twin is. One without a twin, as of a metric, goes where what it takes is, and no column is read by an earlier
stage than in training. Every operator goes where the parameters that it takes are trained.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from isthmus.errors import InternalError, UserError
from isthmus.graph.cuts import Flow
from isthmus.graph.opgraph import Op, Ref, TensorSpec
from isthmus.wire_types import Many, Place, Table, Text


class Crossing(msgspec.Struct, frozen=True):
    """One value that travels from stage `source` to stage `target`; its gradient, if due, comes back."""

    value: Ref
    source: Place
    target: Place
    spec: TensorSpec
    gradient: bool


class StageGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a graph that one stage runs."""

    index: Place
    ops: Many[Op]
    """Variables and operators in execution order; operators that need no input appear in every stage that uses them."""
    columns: Many[Text]  # batch columns that this stage reads from its own data
    receives: Many[Crossing]
    sends: Many[Crossing]
    shared_from: Table[Text, Place]
    """Trainable parameters that another stage owns: parameter -> owner. Values come once per step."""
    shared_with: Table[Text, Many[Place]]
    """Trainable parameters that this stage owns and others use too: parameter -> users."""
    loss: Ref | None = None
    count: Ref | None = None
    outputs: Table[Text, Ref] = {}
    schemas: Table[Text, Text] = {}  # schemas of its operators, as the graph has them

    def __post_init__(self) -> None:
        """ValueError for a value that nothing in the stage makes, and that does not come."""
        received = {crossing.value for crossing in self.receives}
        made = dict.fromkeys((ref.op for ref in received), 0) | {op.name: len(op.outputs) for op in self.ops}
        used = [*(ref for op in self.ops for ref in op.refs()), *(c.value for c in self.sends), *self.outputs.values()]
        for ref in (*used, self.loss, self.count):
            if ref is not None and ref not in received and ref.index >= made.get(ref.op, 1):  # 1: a column of the batch
                raise ValueError(f"output {ref.index} of {ref.op!r} is used in stage {self.index}, which has none")

    def received_from(self, source: int) -> tuple[Crossing, ...]:
        """Return the values that arrive from another stage in the forward pass, in the order in which they travel."""
        return tuple(c for c in self.receives if c.source == source)

    def sent_to(self, target: int) -> tuple[Crossing, ...]:
        """Return the values that go to another stage in the forward pass, in the order in which they travel."""
        return tuple(c for c in self.sends if c.target == target)

    def variables(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.kind in ("parameter", "buffer", "constant"))


def assign(flow: Flow, boundaries: Sequence[int]) -> dict[str, int]:
    """Stage of each operator when stage k ends before operator number `boundaries[k]` of `flow.operators`."""
    bounds = [0, *boundaries, len(flow.operators)]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise UserError(
            f"cut positions: got {list(boundaries)}, expected strictly increasing within 1..{bounds[-1] - 1}"
        )
    return {op.name: stage for stage, (a, b) in enumerate(itertools.pairwise(bounds)) for op in flow.operators[a:b]}


def partition(flow: Flow, stage_of: Mapping[str, int]) -> tuple[StageGraph, ...]:
    """The stage graphs under an assignment of `flow.operators` to stages 0..S-1.

    Raises InternalError when data would flow to an earlier stage, UserError when two stages would write one buffer.
    """
    users = _users(flow, stage_of)
    home = _homes(flow, stage_of, users)
    crossings = _crossings(flow, home)
    return tuple(_stage(flow, index, users, home, crossings) for index in range(max(stage_of.values()) + 1))


def _users(flow: Flow, stage_of: Mapping[str, int]) -> dict[str, list[int]]:
    """Stages that need each op, ascending: an assigned operator is needed where it runs, all else where it is used."""
    masks = dict.fromkeys(flow.by_name, 0)  # a bit for each stage
    if flow.graph.count is not None:  # the stage of the loss tells both
        masks[flow.graph.count.op] = 1 << stage_of[flow.graph.loss.op]
    for op in reversed(flow.graph.ops):
        mask = 1 << stage_of[op.name] if op.name in stage_of else masks[op.name]
        for ref in flow.taken[op.name]:
            masks[ref.op] |= mask
    lists = {mask: [k for k in range(mask.bit_length()) if mask >> k & 1] for mask in set(masks.values())}
    return {name: lists[mask] for name, mask in masks.items()}


def _homes(flow: Flow, stage_of: Mapping[str, int], users: Mapping[str, list[int]]) -> dict[str, int]:
    """The stage that holds each op: where it runs, or the first that uses it; the first of all if it alone has data."""
    last = max(stage_of.values())
    home = {name: stages[0] if stages else last for name, stages in users.items()}
    home.update(stage_of)
    if flow.columns_first:
        first, placeholders = min(stage_of.values()), (op for op in flow.graph.ops if op.kind == "placeholder")
        home.update((op.name, first) for op in placeholders if users[op.name])
    for op in flow.graph.ops:
        for name in op.mutates:
            if users[name] != [stage_of[op.name]]:
                raise UserError(
                    f"buffer {flow.by_name[name].target!r} is written in stage {stage_of[op.name]} and used in "
                    f"stages {users[name]}: cut elsewhere, a written buffer lives in one stage"
                )
    return home


def _crossings(flow: Flow, home: Mapping[str, int]) -> list[Crossing]:
    found: list[Crossing] = []
    for ref, spec, takers in flow.values:
        source = home[ref.op]
        targets = {home[taker] for taker in takers}
        targets.discard(source)
        if not targets:
            continue
        if min(targets) < source:
            raise InternalError(f"op {ref.op} of stage {source} feeds an earlier stage: {sorted(targets)}")
        returning = {home[c] for c in flow.returning.get(ref, ())}
        found += [Crossing(ref, source, t, spec, t in returning) for t in sorted(targets)]
    return found


def _stage(
    flow: Flow, index: int, users: Mapping[str, list[int]], home: Mapping[str, int], crossings: Sequence[Crossing]
) -> StageGraph:
    graph = flow.graph
    held: list[Op] = []
    columns: list[str] = []
    shared_from: dict[str, int] = {}
    shared_with: dict[str, tuple[int, ...]] = {}
    for op in graph.ops:
        if op.kind == "placeholder":
            if users[op.name] and home[op.name] == index:
                columns.append(op.target)
            continue
        shared = op.kind in ("parameter", "buffer", "constant") or op.name in flow.free
        if index != home[op.name] and not (shared and index in users[op.name]):
            continue
        held.append(op)
        if op.kind == "parameter" and any(op.requires_grad) and len(users[op.name]) > 1:
            if home[op.name] == index:
                shared_with[op.name] = tuple(u for u in users[op.name] if u != index)
            else:
                shared_from[op.name] = home[op.name]
    return StageGraph(
        index=index,
        ops=tuple(held),
        columns=tuple(columns),
        receives=tuple(c for c in crossings if c.target == index),
        sends=tuple(c for c in crossings if c.source == index),
        shared_from=shared_from,
        shared_with=shared_with,
        loss=graph.loss if home[graph.loss.op] == index else None,
        count=graph.count if home[graph.loss.op] == index else None,
        outputs={k: r for k, r in graph.outputs.items() if home[r.op] == index},
        schemas={op.target: graph.schemas[op.target] for op in held if op.target in graph.schemas},
    )


def align(train: Flow, evaluation: Flow, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Stage of each operator of `evaluation.operators`, given those of `train.operators`.

    UserError when the eval graph takes what training changes in an order that this cut does not allow.
    """
    twins = _twins(train, evaluation)
    homes = _variable_homes(train, stage_of)
    read = _column_homes(train, stage_of)
    found: dict[str, int] = {}
    before = 0
    for op in evaluation.operators:
        sources = [found[ref.op] for ref in op.refs() if ref.op in found]
        earliest = max(sources, default=0)
        readers = [read[column] for r in op.refs() if (column := evaluation.by_name[r.op].target) in read]
        wish = stage_of[twins[op.name]] if op.name in twins else max([*sources, *readers], default=before)
        variables = {evaluation.by_name[ref.op].target for ref in op.refs()} & homes.keys()
        before = found[op.name] = _place(op, wish, earliest, {v: homes[v] for v in variables})
    return found


def _place(op: Op, wish: int, earliest: int, homes: Mapping[str, set[int]]) -> int:
    """The stage nearest to `wish`, not before its inputs, that holds all that `op` takes."""
    if not homes:
        return max(wish, earliest)
    common = set[int].intersection(*homes.values())
    allowed = [stage for stage in common if stage >= earliest]
    if not allowed:
        raise UserError(
            f"model: in eval mode module {op.module or '(top)'!r} takes {', '.join(sorted(homes))} in stage {earliest} "
            "or later, where training does not hold it: cut elsewhere or make both forwards alike"
        )
    return min(allowed, key=lambda stage: (abs(stage - wish), stage))


def _twins(train: Flow, evaluation: Flow) -> dict[str, str]:
    """Eval operator -> the train operator that computes the same thing."""
    keys = [_key(train, op) for op in train.operators], [_key(evaluation, op) for op in evaluation.operators]
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return {
        evaluation.operators[block.b + i].name: train.operators[block.a + i].name
        for block in blocks
        for i in range(block.size)
    }


def _variable_homes(train: Flow, stage_of: Mapping[str, int]) -> dict[str, set[int]]:
    """Return the stages that have the value of each variable that training changes."""
    homes: dict[str, set[int]] = {}
    for op in train.operators:
        for ref in op.refs():
            variable = train.by_name[ref.op]
            if variable.learns:
                homes.setdefault(variable.target, set()).add(stage_of[op.name])
    return homes


def _column_homes(train: Flow, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Column -> the first stage that computes with it in training."""
    homes: dict[str, int] = {}
    for op in train.operators:
        for ref in op.refs():
            if (column := train.by_name[ref.op]).kind == "placeholder":
                homes[column.target] = min(stage_of[op.name], homes.get(column.target, stage_of[op.name]))
    return homes


def _key(flow: Flow, op: Op) -> tuple[str, str, tuple[str, ...]]:
    variables = tuple(
        flow.by_name[r.op].target for r in op.refs() if flow.by_name[r.op].kind in ("parameter", "buffer")
    )
    return op.target, op.module, variables
