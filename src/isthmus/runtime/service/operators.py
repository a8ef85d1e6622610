"""The matrix products and the attention of a job's model, which devices are measured in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from isthmus.graph import Flow, Op, OpGraph
from isthmus.runtime.messages.probe import MOST_OPERATORS, AttentionShape, MatrixProduct

Shape = Sequence[int]
_MATRICES = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul")
_ATTENTION = "scaled_dot_product_attention"


def operators_of(graph: OpGraph, micro_batch_size: int) -> tuple[MatrixProduct | AttentionShape, ...]:
    """Of one micro-batch's forward: linear layers and products as matrix products, and fused attention as it is; those
    that are alike counted together, the largest first. Empty for a model without any, as of convolutions."""
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
