"""Bytes of messages under the compression that is asked for, at least, and as a document packs them."""

from __future__ import annotations

from isthmus.expected_loss import expected_increase, harshest_ratio
from isthmus.plans import CompressionConfig, Packing
from isthmus.plans.packing import DENSE
from isthmus.verification.cutting import Flowing
from isthmus.verification.question import Question
from isthmus.verification.reading import GraphValue


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


def packed_bytes(flow: Flowing, size_bytes: int, packing: Packing) -> int:
    """Return the bytes of one direction of an edge. Each tensor that a codec makes shorter is compressed."""
    return size_bytes - (sum(packing.saves(*tensor) for tensor in flow.packable) if size_bytes else 0)
