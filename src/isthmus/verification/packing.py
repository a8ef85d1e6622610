"""Bytes of messages under the compression that is asked for: of a pipeline's as far as that is known, and at least."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from isthmus.expected_loss import expected_increase, harshest_ratio
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.plans import CompressionConfig, Packing
from isthmus.plans.packing import DENSE
from isthmus.verification.cutting import CutGraph, Flowing
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphValue

MILDER = 1 - 1e-6
"""Factor on a ratio that is a quotient of sums: what is sent is no less than with the planner's. Divided by it, the
ratio is no less than the planner's."""
LARGE = 1 << 40
HALVINGS = 50


def offers(asked: CompressionConfig | None) -> tuple[Packing, ...]:
    """Codecs of which one makes any tensor at least as short as the method ever does."""
    if asked is None:
        return ()
    match asked.method:
        case method if method in DENSE:
            return tuple(Packing(codec=codec) for codec in (method, asked.backward or method))
        case "uniform":
            return (Packing(codec="topk", ratio=asked.ratio),)
        case "just-enough":
            return _just_enough(asked.ratio, asked.loss_budget)
        case _:  # of AdaTopK: its factor is 3 at most, the paper's
            return (Packing(codec="topk", ratio=3 * asked.ratio),)


def _just_enough(ratio: float, budget: float | None) -> tuple[Packing, ...]:
    """Within a loss budget, those that it allows one message."""
    dense = [Packing(codec=codec) for codec in DENSE]
    if budget is None:
        return *dense, Packing(codec="topk", ratio=ratio)
    allowed = [packing for packing in dense if expected_increase(packing) <= budget]
    return *allowed, Packing(codec="topk", ratio=min(ratio, harshest_ratio(budget)))


def least_bytes(asked: CompressionConfig | None, elements: int, dtype: str, size_bytes: int) -> int:
    """Return the least bytes of a tensor that carries a gradient."""
    return size_bytes - max((packing.saves(elements, dtype) for packing in offers(asked)), default=0)


def wire_bytes(question: Question, value: GraphValue) -> int:
    """Return the least bytes in which a value, or its gradient, is sent."""
    asked = question.constraints.compression
    return least_bytes(asked, value.elements, value.dtype, value.size_bytes) if value.returns else value.size_bytes


def is_exact(asked: CompressionConfig | None) -> bool:
    """Return whether `as_requested` knows the bytes, rather than an upper bound on them."""
    return asked is None or (asked.method in (*DENSE, "uniform") and asked.backward in (None, asked.method))


def as_requested(question: Question, graph: CutGraph, devices: Sequence[str], *, least: bool = False) -> CutGraph:
    """The graph with the bytes that cross its links, never less than a planner's: where the method looks further than
    this check does, as if nothing were packed. Or, `least`, never more: as if it packed each tensor as far as it may.
    """
    asked = question.constraints.compression
    if asked is None or not graph.flowing or (asked.method == "just-enough" and not least):
        return graph
    if asked.method == "just-enough":
        return graph._replace(flowing=tuple(_shortest(asked, f) for f in graph.flowing))
    if asked.method in ("adatopk", "adatopk-paper"):
        codecs = _in_proportion(question, asked, graph, devices, 1 / MILDER if least else MILDER)
    else:
        offered = offers(asked)
        codecs = [(offered[0], offered[-1])] * len(graph.flowing)
    return graph._replace(
        flowing=tuple(
            f._replace(
                forward_bytes=packed_bytes(f, f.forward_bytes, there),
                backward_bytes=packed_bytes(f, f.backward_bytes, back),
            )
            for f, (there, back) in zip(graph.flowing, codecs, strict=True)
        )
    )


def _shortest(asked: CompressionConfig, flow: Flowing) -> Flowing:
    dense = [(count, dtype, count * DTYPE_BYTES[dtype]) for count, dtype in flow.packable]
    saved = sum(size - least_bytes(asked, count, dtype, size) for count, dtype, size in dense)
    return flow._replace(forward_bytes=flow.forward_bytes - saved, backward_bytes=max(0, flow.backward_bytes - saved))


def packed_bytes(flow: Flowing, size_bytes: int, packing: Packing) -> int:
    """Return the bytes of one direction of an edge. Each tensor that a codec makes shorter is compressed."""
    return size_bytes - (sum(packing.saves(*tensor) for tensor in flow.packable) if size_bytes else 0)


def _in_proportion(
    question: Question, asked: CompressionConfig, graph: CutGraph, devices: Sequence[str], factor: float
) -> list[tuple[Packing, ...]]:
    """FusionLLM's Eq. 7, there and back: max(1, c r R_i / max R), with a factor on the quotient."""

    def seconds(source: str, target: str, size_bytes: int) -> float:
        if source == target or not size_bytes:
            return 0.0
        link = question.fleet.link(source, target)
        return link.latency_s + size_bytes / link.bandwidth_bytes_per_s

    times = [
        (
            seconds(devices[f.source], devices[f.target], f.forward_bytes),
            seconds(devices[f.target], devices[f.source], f.backward_bytes),
        )
        for f in graph.flowing
    ]
    slowest_s, flow = max(((max(pair), f) for pair, f in zip(times, graph.flowing, strict=True)), key=lambda x: x[0])
    most = 3 * asked.ratio if asked.method == "adatopk-paper" else _shortening(asked.ratio, _element_bytes(flow))
    per_s = factor * most / slowest_s if slowest_s else 0.0
    return [tuple(Packing(codec="topk", ratio=max(1.0, per_s * s)) for s in pair) for pair in times]


def _element_bytes(flow: Flowing) -> float:
    elements = sum(count for count, _ in flow.packable)
    return sum(count * DTYPE_BYTES[dtype] for count, dtype in flow.packable) / elements if elements else 4.0


@cache
def _shortening(ratio: float, each: float) -> float:
    """The ratio, at least 1, at which a large message of elements of so many bytes is so many times shorter."""
    low, high = 1.0, 3 * ratio
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if Packing(codec="topk", ratio=middle).wire_bytes(LARGE) * ratio > each * LARGE:
            low = middle
        else:
            high = middle
    return low
