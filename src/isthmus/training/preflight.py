"""Checks of a job that are possible before any process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.errors import UserError
from isthmus.graph import Op, OpGraph, Ref
from isthmus.training.optim import OptimizerConfig, choose

REARRANGING = {  # operators whose result holds elements of their first argument, and padding
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "slice",
    "select",
    "narrow",
    "expand",
    "repeat",
    "transpose",
    "permute",
    "t",
    "contiguous",
    "clone",
    "to",
    "_to_copy",
    "detach",
    "alias",
    "pad",
    "constant_pad_nd",
}


def check_optimizers(configs: Sequence[OptimizerConfig], graph: OpGraph) -> None:
    """UserError for a parameter that no optimizer matches or can update, and for an entry that updates none."""
    parameters, used = graph.trainable, set[int]()
    for op in (op for op in graph.ops if op.kind == "parameter" and op.target in parameters):
        chosen = choose(configs, op.target)
        used.add(chosen)
        shape = op.outputs[0].shape_at(1)
        if configs[chosen].name == "muon" and len(shape) != 2:
            raise UserError(
                f"optimizer: muon: got parameter {op.target!r} of shape {list(shape)}, expected matrices: put an entry "
                f"for it before entry {chosen + 1}"
            )
    for index, config in enumerate(configs):
        if index not in used:
            raise UserError(
                f"optimizer: pattern {config.pattern!r} of entry {index + 1} updates no parameter: the model has "
                f"{len(parameters)}, such as {', '.join(map(repr, parameters[:3]))}, and the first match wins"
            )


def check_types(graph: OpGraph) -> None:
    """UserError for a parameter or buffer that no checkpoint can hold: safetensors has no word for complex128."""
    for op in graph.ops:
        if op.kind in ("parameter", "buffer") and op.outputs[0].dtype == "complex128":
            raise UserError(
                f"model: {op.kind} {op.target!r}: got complex128, expected complex64: safetensors cannot save it"
            )


def check_limits(graph: OpGraph, limits: Mapping[str, int]) -> None:
    """UserError where ids of a column can lie outside an embedding, or classes outside a cross-entropy's.

    `limits` says below what each column's values stay. On a device such a value is an error of some step, or worse.
    """
    ops = {op.name: op for op in graph.ops}
    for op in graph.ops:
        name = op.target.split(".")[1] if op.kind == "operator" and op.target.startswith("aten.") else ""
        if name not in ("embedding", "cross_entropy_loss", "nll_loss", "nll_loss_nd"):
            continue
        values, indices = op.args[:2]
        if not isinstance(values, Ref) or not isinstance(indices, Ref):
            continue
        column = _column(ops, indices)
        shape = ops[values.op].outputs[values.index].shape
        size = shape[0] if name == "embedding" or len(shape) == 1 else shape[1]
        if column in limits and isinstance(size, int) and limits[column] > size:
            what = "embedding has rows" if name == "embedding" else "loss has classes"
            raise UserError(
                f"data: column {column!r} holds values up to {limits[column] - 1}, but the model's {what} for "
                f"0 to {size - 1} only ({op.module or op.name})"
            )


def _column(ops: Mapping[str, Op], value: Ref) -> str:
    """The column whose elements a value holds, or an empty text."""
    op = ops[value.op]
    while op.kind == "operator" and op.target.split(".")[1] in REARRANGING and isinstance(op.args[0], Ref):
        op = ops[op.args[0].op]
    return op.target if op.kind == "placeholder" else ""
