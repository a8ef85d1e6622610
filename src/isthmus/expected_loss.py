"""The expected increase of the loss by compressed messages, from trainings that were measured.

A held-out loss at equal steps, relative to the dense model's: `measured_losses.json`, which benchmarks/wan_loss writes,
from a pipeline of eight stages. Each message of a plan is charged an equal part of what all packed messages of the
measured pipeline cost together: an assumption. So is that a loss falls with the steps as the dense model's did.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from importlib import resources

import msgspec

from isthmus.plans import CompressionConfig, Edge, Packing, Replica

BOTTLENECKS = 7
MESSAGES = 2 * BOTTLENECKS  # messages of the measured pipeline, there and back


class MeasuredLosses(msgspec.Struct, frozen=True, kw_only=True):
    """Increases of the loss, none negative and none below that of something milder."""

    measured_on: str
    exponent: float
    """Exponent of the dense model's loss, which falls as steps ** -exponent between half of the steps and all."""
    codecs: dict[str, float]  # increases by all messages
    topk: dict[float, float]  # the same, by ratio
    subspace: dict[float, float]  # increases by rate
    residual: dict[float, float]  # increases by all bottlenecks, by rate


MEASURED_FILE = resources.files("isthmus").joinpath("measured_losses.json")
_MEASURED = msgspec.json.decode(MEASURED_FILE.read_bytes(), type=MeasuredLosses)
MEASURED_ON, EXPONENT = _MEASURED.measured_on, _MEASURED.exponent
CODECS = {name: increase / MESSAGES for name, increase in _MEASURED.codecs.items()}  # increases by one message
TOPK = {1.0: 0.0} | {ratio: increase / MESSAGES for ratio, increase in _MEASURED.topk.items()}
"""The same of top-K, by ratio."""
BOUNDARIES = {"subspace": _MEASURED.subspace, "residual": _MEASURED.residual}


def expected_increase(packing: Packing) -> float:
    """Return the increase by one message, as a share of the loss; inf where nothing like it was measured."""
    if packing.codec != "topk":
        return CODECS.get(packing.codec, math.inf)
    if packing.ratio > max(TOPK):
        return math.inf
    above = min(r for r in TOPK if r >= packing.ratio)
    below = max(r for r in TOPK if r <= packing.ratio)
    share = math.log(packing.ratio / below) / math.log(above / below) if above > below else 0.0
    return TOPK[below] + share * (TOPK[above] - TOPK[below])


def boundary_increase(method: str, rates: Collection[float]) -> float:
    """Return the increase by a boundary of the model: `residual` has a bottleneck for each rate, of which the measured
    pipeline had `BOTTLENECKS`. inf where a rate was not measured."""
    found = sum(BOUNDARIES[method].get(rate, math.inf) for rate in rates)
    return found / BOTTLENECKS if method == "residual" else found


def harshest_ratio(budget: float) -> float:
    """Return top-K's highest ratio, rounded up, whose increase by one message is within the budget."""
    points = list(TOPK.items())
    above = next((k for k, (_, increase) in enumerate(points) if increase > budget), None)
    if above is None:
        return points[-1][0]
    (low, cost), (high, dearer) = points[above - 1], points[above]
    return low * (high / low) ** ((budget - cost) / (dearer - cost)) * (1 + 1e-9)


def more_steps(increase: float) -> float:
    """Return the factor of the steps that reach the loss that would be reached without the increase."""
    return (1 + increase) ** (1 / EXPONENT)


def increase_of(replicas: Iterable[Replica]) -> float:
    """Return the increase by all compressed messages of a plan; those of a replica count for its part of the batch."""
    parts = [(r.micro_batches, packed_increase(r.edges)) for r in replicas]
    return sum(count * increase for count, increase in parts) / sum(count for count, _ in parts)


def packed_increase(edges: Iterable[Edge]) -> float:
    """Return the increase by the compressed messages of one replica."""
    packed = [c for e in edges for c in (e.forward_compression, e.backward_compression) if c is not None]
    return sum(expected_increase(c.packing) for c in packed)


def packed_note(asked: CompressionConfig, replicas: Sequence[Replica]) -> str:
    """Say how many of all messages are compressed."""
    edges = [edge for replica in replicas for edge in replica.edges]
    packed = sum(c is not None for e in edges for c in (e.forward_compression, e.backward_compression))
    sent = sum(size > 0 for e in edges for size in (e.forward_bytes, e.backward_bytes))
    words = f"compression {asked.method!r} packs {packed} of {sent} messages"
    increase = increase_of(replicas)
    if not math.isfinite(increase):
        return words
    steps = f": {more_steps(increase):.3g} times as many steps to reach a loss" if increase else ""
    return f"{words}; expected loss {increase:+.2%}{steps}, as measured on {MEASURED_ON}"
