"""The price of a step: every device in use for as long as it lasts, and every byte that leaves a priced region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.fleet import Fleet
from isthmus.plans import ReplicaSync
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
