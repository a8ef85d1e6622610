"""The price of a step: every device in use for as long as it lasts, and every byte that leaves a priced region; and a
lower bound on it for any plan, where egress is not counted.

The bound: every FLOP where it is cheapest; a pipeline of several devices pays all of them while its first micro-batch
passes, of which each computes a part; and several replicas pay at least two devices for as long as any such plan takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from isthmus.fleet import Fleet
from isthmus.plans import ReplicaSync
from isthmus.verification.bound import NEVER, Bounds
from isthmus.verification.sums import rounds_of
from isthmus.verification.timing import StepTiming

SECONDS_PER_HOUR = 3600
BYTES_PER_GB = 10**9


def paid(
    fleet: Fleet, replicas: Sequence[StepTiming], micro_batches: Sequence[int], sync: ReplicaSync, step_s: float
) -> float:
    """In the unit of the fleet's prices; of sums, the mean over a period. `sync` is well formed."""
    used = {name for replica in replicas for name in replica.used}
    hourly = sum(fleet.device(name).price_per_hour for name in used)
    sent: dict[str, float] = {}
    for source, target, size_bytes in _messages(replicas, micro_batches, sync):
        home = fleet.device(source).region
        if home != fleet.device(target).region:
            sent[home] = sent.get(home, 0.0) + size_bytes
    leaving = sum(size * fleet.region_info_of(region).egress_price_per_gb for region, size in sent.items())
    return hourly * step_s / SECONDS_PER_HOUR + leaving / BYTES_PER_GB


def _messages(
    replicas: Sequence[StepTiming], micro_batches: Sequence[int], sync: ReplicaSync
) -> Iterator[tuple[str, str, float]]:
    """(source, target, bytes per step)."""
    for replica, count in zip(replicas, micro_batches, strict=True):
        yield from replica.sent(count)
    for group in sync.groups:
        often = len(group.iterations) / sync.period
        for sent in rounds_of(group):
            for a, b, size_bytes in sent:
                yield a, b, often * size_bytes


MOST_SETS = 6  # devices up to which each set of them is bounded by itself


def single_price(bounds: Bounds) -> float:
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
