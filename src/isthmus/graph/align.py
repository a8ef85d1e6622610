"""Carry a cut from the train graph over to the eval graph of the same model.

Both list nearly the same operators in the same order: dropout becomes the identity, batch norm reads its running
statistics, a module may add or leave out a branch. An eval operator goes where its train twin is. One without a twin
goes where what it takes is, and every operator where the parameters that it takes are trained.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from isthmus.errors import UserError
from isthmus.graph.flow import Flow
from isthmus.graph.opgraph import Op


def align(train: Flow, evaluation: Flow, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Stage of each operator of `evaluation.operators`, given those of `train.operators`.

    UserError when the eval graph takes what training changes in an order that this cut does not allow.
    """
    twins = _twins(train, evaluation)
    homes = _homes(train, stage_of)
    found: dict[str, int] = {}
    before = 0
    for op in evaluation.operators:
        sources = [found[ref.op] for ref in op.refs() if ref.op in found]
        earliest = max(sources, default=0)
        wish = stage_of[twins[op.name]] if op.name in twins else max(sources, default=before)
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


def _homes(train: Flow, stage_of: Mapping[str, int]) -> dict[str, set[int]]:
    """What training changes -> the stages that have its value."""
    homes: dict[str, set[int]] = {}
    for op in train.operators:
        for ref in op.refs():
            variable = train.by_name[ref.op]
            if variable.learns:
                homes.setdefault(variable.target, set()).add(stage_of[op.name])
    return homes


def _key(flow: Flow, op: Op) -> tuple[str, str, tuple[str, ...]]:
    variables = tuple(
        flow.by_name[r.op].target for r in op.refs() if flow.by_name[r.op].kind in ("parameter", "buffer")
    )
    return op.target, op.module, variables
