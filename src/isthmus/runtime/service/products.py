"""The matrix products of a job's model, that devices are measured in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from isthmus.graph import Flow, Op, OpGraph
from isthmus.runtime.messages.probe import MOST_PRODUCTS, Product

Shape = Sequence[int]


def products_of(graph: OpGraph, micro_batch_size: int) -> tuple[Product, ...]:
    """Of one micro-batch's forward: linear layers, products, and attention as its two products; those that are alike
    counted together, the largest first. Empty for a model without any, as of convolutions."""
    flow, found = Flow(graph), Counter[tuple[int, int, int, int]]()
    for op in graph.ops:
        name = op.target.removeprefix("aten.").partition(".")[0]
        if op.kind == "operator" and name in _READ:
            shapes = [flow.by_name[r.op].outputs[r.index].shape_at(micro_batch_size) for r in op.refs()]
            found.update(_products(name, op, shapes, micro_batch_size))
    all_products = [Product(*sizes, count) for sizes, count in found.items()]
    return tuple(sorted(all_products, key=lambda p: -p.flops)[:MOST_PRODUCTS])


_READ = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "scaled_dot_product_attention")


def _products(
    name: str, op: Op, shapes: Sequence[Shape], micro_batch_size: int
) -> Iterator[tuple[int, int, int, int]]:  # fmt: skip
    """Batch, m, n, k."""
    if name in ("addmm", "baddbmm"):
        shapes = shapes[1:]
    a, b = shapes[0], shapes[1]
    if name == "linear":
        yield 1, math.prod(a[:-1]), b[0], a[-1]
    elif name == "scaled_dot_product_attention":
        batch, queries, keys, size = math.prod(a[:-2]), a[-2], b[-2], a[-1]
        yield batch, queries, keys, size
        yield batch, queries, size, keys
    elif len(a) >= 2 and len(b) >= 2:
        out = op.outputs[0].shape_at(micro_batch_size)
        yield math.prod(out[:-2]), a[-2], b[-1], a[-1]
