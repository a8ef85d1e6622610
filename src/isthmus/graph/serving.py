"""The graph of a model that generates text.

Attention runs over a key-value cache (`isthmus.training.generation`), so every attention must be causal, and nothing
else may look at other positions.
"""

from __future__ import annotations

import msgspec

from isthmus.errors import UserError
from isthmus.graph.opgraph import Op, OpGraph

TOKENS, POSITIONS = "input_ids", "position_ids"
ATTENTION = "aten.scaled_dot_product_attention.default"
CANNOT = "the model cannot be served"


def check_attention(graph: OpGraph) -> None:
    """UserError unless all attention is causal, by the one operator that a cache is kept for."""
    found = [op for op in graph.ops if op.target == ATTENTION]
    if not found:
        raise UserError(f"{CANNOT}: it has no scaled_dot_product_attention, for which a key-value cache is kept")
    for op in found:
        if not _is_causal(op):
            raise UserError(
                f"{CANNOT}: attention in module {op.module!r} has a mask of its own, expected causal attention "
                "(is_causal=True, without a mask)"
            )


def _is_causal(op: Op) -> bool:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), op.args, strict=False))
    given |= op.kwargs
    return given.get("attn_mask") is None and given.get("is_causal") is True


def with_given_positions(graph: OpGraph) -> OpGraph:
    """Every stage knows the positions of its tokens: what is computed of them alone is computed again, not sent."""
    ops = tuple(
        msgspec.structs.replace(op, kind="constant") if op.kind == "placeholder" and op.target == POSITIONS else op
        for op in graph.ops
    )
    return msgspec.structs.replace(graph, ops=ops)
