"""The questions of a probe to devices for a job: its model's operators, and its model's first layers as stages.

Sky Computing (sec. IV-B) times "the first few layers of the training model". More layers are nearer to the whole, and
take longer, and more memory: stages of about 1/128, 1/64, ..., 1/2 and all of the model's FLOPs are sent, and each
device measures them one after another as far as they fit and are quick.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import bytes_of
from isthmus.graph import Affine, Flow, Op, OpGraph, assign, cuts, partition
from isthmus.job import Prepared
from isthmus.runtime.messages.probe import (
    MOST_LAYERS,
    MOST_OPERATORS,
    AttentionShape,
    LayerStage,
    LayerTrial,
    MatrixProduct,
    MeasureSpeed,
    SyntheticColumn,
)

SHARES = tuple(2.0**-k for k in reversed(range(MOST_LAYERS)))


def speed_question(prepared: Prepared) -> MeasureSpeed:
    """The same for each device. The caller sets the probe's name."""
    job = prepared.job
    return MeasureSpeed(
        run="",
        operators=operators_of(prepared.captured.train, job.micro_batch_size),
        trial=_trial(prepared),
        threads=job.runtime.threads,
    )


def _trial(prepared: Prepared) -> LayerTrial | None:
    """None for a model whose operators count no FLOPs."""
    job, problem = prepared.job, prepared.alone()
    layers = tuple(_layers(problem, position) for position in _ends(problem))
    if not layers:
        return None
    limits = {name: column.limit for name, column in prepared.samples.columns.items()}
    graph = problem.flow.graph
    return LayerTrial(
        layers=layers,
        operators=len(problem.flow.operators),
        engine=job.engine(),
        precision=job.training.precision,
        columns={
            op.target: SyntheticColumn(op=op.name, spec=op.outputs[0], limit=limits.get(op.target))
            for op in graph.ops
            if op.kind == "placeholder"
        },
        any_batch=graph.batch is None,
    )


def _ends(problem: Problem) -> list[int]:
    """Where the stages end: the first cuts with so much of the FLOPs before them, and the end of the model."""
    flops, whole = problem.cumulative_flops, len(problem.flow.operators)
    possible = [*(cut.position for cut in cuts(problem.flow)), whole]
    wanted = (bisect.bisect_left(possible, share * flops[-1], key=flops.__getitem__) for share in SHARES)
    return [end for end in dict.fromkeys(possible[at] for at in wanted) if flops[end]]


def _layers(problem: Problem, position: int) -> LayerStage:
    flow, end = problem.flow, len(problem.flow.operators)
    stage = partition(flow, assign(flow, [position] if position < end else []))[0]
    flops = sum((op.flops_forward + op.flops_backward for op in flow.operators[:position]), Affine(0))
    needed = bytes_of(problem, stage)
    return LayerStage(
        stage=stage,
        operators=position,
        flops=flops,
        memory_bytes=needed.weights + needed.gradients + needed.kept(recompute=False),
    )


Shape = Sequence[int]
_MATRICES = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul")
_ATTENTION = "scaled_dot_product_attention"


def operators_of(graph: OpGraph, micro_batch_size: int) -> tuple[MatrixProduct | AttentionShape, ...]:
    """Return the operators of one micro-batch's forward: linear layers and products as matrix products, and fused
    attention as it is; those that are alike counted together, the largest first. Empty for a model without any, as of
    convolutions."""
    flow, found = Flow(graph), Counter[MatrixProduct | AttentionShape]()
    for op in graph.ops:
        name = op.target.removeprefix("aten.").partition(".")[0]
        if op.kind == "operator" and name in (*_MATRICES, _ATTENTION):
            shapes = [flow.by_name[r.op].outputs[r.index].shape_at(micro_batch_size) for r in op.refs()]
            out = op.outputs[0].shape_at(micro_batch_size)
            found.update([_attention(op, shapes)] if name == _ATTENTION else _products(name, shapes, out))
    counted = [msgspec.structs.replace(operator, count=count) for operator, count in found.items()]
    return tuple(sorted(counted, key=lambda operator: -operator.flops)[:MOST_OPERATORS])


def _products(name: str, shapes: Sequence[Shape], out: Shape) -> Iterator[MatrixProduct]:
    a, b = shapes[1:] if name in ("addmm", "baddbmm") else shapes[:2]
    if name == "linear":
        yield MatrixProduct(1, math.prod(a[:-1]), b[0], a[-1])
    elif len(a) >= 2 and len(b) >= 2:
        yield MatrixProduct(math.prod(out[:-2]), a[-2], b[-1], a[-1])


def _attention(op: Op, shapes: Sequence[Shape]) -> AttentionShape:
    queries, keys, values = shapes[:3]
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), op.args[3:], strict=False)) | op.kwargs
    return AttentionShape(
        batch=math.prod(queries[:-3]),
        heads=queries[-3] if len(queries) > 2 else 1,
        key_heads=keys[-3] if len(keys) > 2 else 1,
        queries=queries[-2],
        keys=keys[-2],
        size=queries[-1],
        value_size=values[-1],
        causal=named.get("is_causal") is True,
        masked=named.get("attn_mask") is not None,
    )
