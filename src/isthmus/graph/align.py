"""Carry a cut from the train graph over to the eval graph of the same model.

Both list nearly the same operators in the same order: dropout becomes the identity, batch norm reads its running
statistics, a module may add or leave out a branch. An eval operator goes where its train twin is; one without a
twin goes with the operator before it, but never before a stage that feeds it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from isthmus.graph.flow import Flow
from isthmus.graph.opgraph import Op


def align(train: Flow, evaluation: Flow, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Stage of each operator of `evaluation.operators`, given those of `train.operators`."""
    keys = [_key(train, op) for op in train.operators], [_key(evaluation, op) for op in evaluation.operators]
    twins: dict[int, int] = {}
    for block in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        twins |= {block.b + i: block.a + i for i in range(block.size)}
    home = {
        ref.op: stage
        for op in reversed(train.operators)
        for ref in op.refs()
        if train.by_name[ref.op].kind in ("parameter", "buffer")
        for stage in (stage_of[op.name],)
    }
    by_target = {train.by_name[name].target: stage for name, stage in home.items()}
    found: dict[str, int] = {}
    current = 0
    for index, op in enumerate(evaluation.operators):
        if index in twins:
            stage = stage_of[train.operators[twins[index]].name]
        else:
            variables = [evaluation.by_name[r.op].target for r in op.refs()]
            stage = max([current, *(by_target[v] for v in variables if v in by_target)])
        current = max([stage, *(found[r.op] for r in op.refs() if r.op in found)])
        found[op.name] = current
    return found


def _key(flow: Flow, op: Op) -> tuple[str, str, tuple[str, ...]]:
    variables = tuple(
        flow.by_name[r.op].target for r in op.refs() if flow.by_name[r.op].kind in ("parameter", "buffer")
    )
    return op.target, op.module, variables
