"""A lower bound on the price of a step of any plan, computed apart from the planners'. Egress is not counted.

Every FLOP where it is cheapest; a pipeline of several devices pays all of them while its first micro-batch passes, of
which each computes a part; and several replicas pay at least two devices for as long as any such plan takes.
"""

from __future__ import annotations

import itertools

from isthmus.verification.bound import NEVER, Bounds
from isthmus.verification.price import SECONDS_PER_HOUR

MOST_SETS = 6
"""Devices up to which each set of them is bounded by itself."""


def single_price(bounds: Bounds) -> float:
    """Of one replica."""
    question = bounds.reading.question
    devices, work = question.fleet.devices, question.micro_batches * bounds.work
    per_flop = {d.name: d.price_per_hour / SECONDS_PER_HOUR / question.flops_per_s(d.name) for d in devices}
    large = [d.name for d in devices if question.room_bytes(d.name) >= bounds.need_bytes]
    alone = min((work * per_flop[name] for name in large), default=NEVER)
    if len(devices) == 1 or bounds.blocks == 1:
        return alone
    idle = sorted(d.price_per_hour / SECONDS_PER_HOUR for d in devices)[: max(1, bounds.fewest - 1)]
    fastest = max(question.flops_per_s(d.name) for d in devices)
    return min(alone, work * min(per_flop.values()) + sum(idle) * bounds.work / fastest)


def several_price(bounds: Bounds) -> float:
    """Of two replicas and more."""
    reading, question = bounds.reading, bounds.reading.question
    holders = set(question.constraints.data_holders)
    rate = {d.name: d.price_per_hour / SECONDS_PER_HOUR for d in question.fleet.devices}
    several_s = bounds.several_s()
    if several_s == NEVER:
        return NEVER
    if len(rate) > MOST_SETS:
        cheapest = min(r / question.flops_per_s(name) for name, r in rate.items())
        return max(question.micro_batches * bounds.work * cheapest, sum(sorted(rate.values())[:2]) * several_s)
    found = [NEVER]
    for size in range(2, len(rate) + 1):
        for chosen in itertools.combinations(question.fleet.names, size):
            if not holders or holders & set(chosen):
                part = Bounds(reading, question.fleet.subset(chosen))
                found.append(sum(rate[name] for name in chosen) * part.several_s())
    return min(found)
