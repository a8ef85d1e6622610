"""The computation and the memory of a model's operators: by layer, and one by one."""

from __future__ import annotations

import msgspec
from rich.console import RenderableType

from isthmus.graph import Flow, Op
from isthmus.report.tables import new_table, titled
from isthmus.units import format_size


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one micro-batch, parameters aside: of an operator, or of all of a layer."""

    name: str
    layer: str  # the module that it belongs to, by its own name; empty outside of all
    operator: str = ""  # its kind, as `aten.linear.default`; empty for a layer
    operators: int = 1
    flops_forward: int
    flops_backward: int
    saved_bytes: int  # kept from forward to backward
    output_bytes: int
    parameter_bytes: int = 0


class GraphWeights(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of execution. A parameter counts for the first layer that uses it."""

    model: str
    micro_batch_size: int
    layers: tuple[Weight, ...]
    operators: tuple[Weight, ...]


def graph_weights(flow: Flow, micro_batch_size: int) -> GraphWeights:
    """`flow` is that of the train graph."""
    size, counted = micro_batch_size, set[str]()
    operators: list[Weight] = []
    for op in flow.operators:
        used = [flow.by_name[ref.op] for ref in op.refs() if flow.by_name[ref.op].kind == "parameter"]
        fresh = {p.name: p for p in used if p.name not in counted}
        counted |= set(fresh)
        operators.append(
            Weight(
                name=op.name,
                layer=op.module,
                operator=op.target,
                flops_forward=op.flops_forward.at(size),
                flops_backward=op.flops_backward.at(size),
                saved_bytes=op.saved_bytes.at(size),
                output_bytes=_output_bytes(op, size),
                parameter_bytes=sum(_output_bytes(p, 1) for p in fresh.values()),
            )
        )
    by_layer: dict[str, list[Weight]] = {}
    for weight in operators:
        by_layer.setdefault(weight.layer, []).append(weight)
    layers = tuple(_layer(name, held) for name, held in by_layer.items())
    return GraphWeights(model=flow.graph.name, micro_batch_size=size, layers=layers, operators=tuple(operators))


def _output_bytes(op: Op, size: int) -> int:
    return sum(spec.nbytes(size) for spec in op.outputs)


def _layer(name: str, held: list[Weight]) -> Weight:
    return Weight(
        name=name,
        layer=name,
        operators=len(held),
        flops_forward=sum(w.flops_forward for w in held),
        flops_backward=sum(w.flops_backward for w in held),
        saved_bytes=sum(w.saved_bytes for w in held),
        output_bytes=sum(w.output_bytes for w in held),
        parameter_bytes=sum(w.parameter_bytes for w in held),
    )


def graph_table(weights: GraphWeights, *, operators: bool) -> RenderableType:
    """Layers, or with `operators` every one of them; the sum in the last row."""
    names = ("Operator", "Kind") if operators else ("Layer", "Operators")
    numbers = ("MFLOPs forward", "MFLOPs backward", "Saved", "Output", "Parameters")
    table = new_table((*names, *numbers), numbers)
    rows = weights.operators if operators else weights.layers
    for w in (*rows, msgspec.structs.replace(_layer("all", list(weights.operators)), operator="")):
        table.add_row(
            w.name or "-",
            w.operator if operators else str(w.operators),
            f"{w.flops_forward / 1e6:.4g}",
            f"{w.flops_backward / 1e6:.4g}",
            format_size(w.saved_bytes),
            format_size(w.output_bytes),
            format_size(w.parameter_bytes),
        )
    return titled(f"{weights.model}: one micro-batch of {weights.micro_batch_size}", table)
