"""A lower bound on the step time of any plan, of any number of replicas: simple, and proven apart from the planners'.

A replica on S devices computes W FLOPs per micro-batch. Its first micro-batch takes at least W on the fastest device,
every later one W on all S together, or its largest block (between two places to cut) on the fastest; and each stage
but the first receives what its first block takes, over the best link. With R replicas, all of them together complete
no more than their speeds allow. Whatever the collective, summing G bytes of gradients takes two rounds and R - 1 times
2 G bytes, which at best spread over all N (N - 1) links; once in a period of steps.
"""

from __future__ import annotations

import bisect
import itertools
from typing import NamedTuple

from isthmus.verify.packing import least_bytes
from isthmus.verify.price import SECONDS_PER_HOUR
from isthmus.verify.question import FLOAT32_BYTES
from isthmus.verify.reading import Reading


class _Facts(NamedTuple):
    work: int
    largest_block: int
    speeds: list[float]
    """Fastest first."""
    latency_s: float
    """Of the best link, and its seconds per byte."""
    byte_s: float
    fewest: int
    """Devices that hold the model and one micro-batch."""


def own_bound_s(reading: Reading) -> float:
    """In seconds. 0 proves nothing: the model computes nothing."""
    facts = _facts(reading)
    return min(_single_s(reading, facts), _replicated_s(reading, facts))


def own_price_bound(reading: Reading) -> float:
    """In money per step: every FLOP where it is cheapest, no device ever idle, no egress."""
    question = reading.question
    total = reading.question.micro_batches * (reading.work[0][-1] + reading.work[1][-1])
    per_hour = min(d.price_per_hour / question.flops_per_s(d.name) for d in question.fleet.devices)
    return total * per_hour / SECONDS_PER_HOUR


def _facts(reading: Reading) -> _Facts:
    question = reading.question
    fleet = question.fleet
    total = [f + b for f, b in zip(*reading.work, strict=True)]
    edges = (0, *reading.places, len(reading.operators))
    stated = [fleet.links.default, fleet.links.intra, *(r.link for r in (*fleet.links.regions, *fleet.links.devices))]
    links = [link for link in stated if link is not None]
    state = question.state
    need = reading.kept[-1] + sum(
        v.size_bytes + (v.elements * (state.master + state.gradient + state.optimizer) if v.trained else 0)
        for v in reading.variables
    )
    room = itertools.accumulate(sorted((d.memory_bytes for d in fleet.devices), reverse=True))
    return _Facts(
        work=total[-1],
        largest_block=max(total[b] - total[a] for a, b in itertools.pairwise(edges)),
        speeds=sorted((question.flops_per_s(name) for name in fleet.names), reverse=True),
        # A shared uplink only slows a link down, so the links as stated bound it.
        latency_s=min((link.latency_s for link in links), default=0.0),
        byte_s=min((1 / link.bandwidth_bytes_per_s for link in links), default=0.0),
        fewest=1 + sum(1 for held in room if held < need),
    )


def _single_s(reading: Reading, facts: _Facts) -> float:
    most = min(len(facts.speeds), len(reading.places) + 1)
    received_s = list(itertools.accumulate(sorted(_received_s(reading, facts)), initial=0.0))
    together = list(itertools.accumulate(facts.speeds))
    later = reading.question.micro_batches - 1
    fastest = facts.speeds[0]
    return min(
        facts.work / fastest + received_s[size - 1]
        + later * max(facts.work / together[size - 1], facts.largest_block / fastest)
        for size in range(min(facts.fewest, most), most + 1)
    )  # fmt: skip


def _received_s(reading: Reading, facts: _Facts) -> list[float]:
    """For each place to cut: the messages that a stage starting there exchanges with earlier ones, at least."""
    starts = (0, *reading.places)
    forward, backward = [0] * len(starts), [0] * len(starts)
    asked = reading.question.terms.compression
    for value in reading.values:
        size_bytes = value.size_bytes
        if value.returns:
            size_bytes = least_bytes(asked, value.elements, value.dtype, size_bytes)
        home = bisect.bisect_right(starts, value.made) - 1
        returns = {bisect.bisect_right(starts, position) - 1 for position in value.returns}
        for block in {bisect.bisect_right(starts, position) - 1 for position in value.uses} - {home}:
            forward[block] += size_bytes
            backward[block] += size_bytes if block in returns else 0
    return [
        sum(facts.latency_s + size * facts.byte_s for size in pair if size)
        for pair in zip(forward[1:], backward[1:], strict=True)
    ]


def _replicated_s(reading: Reading, facts: _Facts) -> float:
    devices, micro_batches = len(facts.speeds), reading.question.micro_batches
    gradient_bytes = FLOAT32_BYTES * sum(v.elements for v in reading.variables if v.trained)
    link_s = 2 * gradient_bytes * facts.byte_s / (devices * (devices - 1)) if devices > 1 else 0.0
    rounds = 2 if gradient_bytes else 0
    return min(
        (
            facts.work / facts.speeds[0] + (micro_batches - count) * facts.work / sum(facts.speeds)
            + max(rounds * facts.latency_s, (count - 1) * link_s) / reading.question.period
            for count in range(2, min(devices // facts.fewest, micro_batches) + 1)
        ),
        default=float("inf"),
    )  # fmt: skip
