"""`[sync] period = "auto"`: how often decoupled replicas merge, from how fast their steps and links are.

Replicas that make s samples per second together need P * batch / s seconds for the P batches of a period. In it each
sends its change of every fragment once, and receives what was merged of every one. The period is the least P with

    bytes of either way / bandwidth  <=  LINK_SHARE * P * batch / s        of every replica's link

and with no contribution too late for its merge, in a simulation of some merges without faults. Where every period has
late ones, as a device has that is very slow beside the others, links alone decide: what is late counts in the next
merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.runtime.decoupled.merged_run import merge_rules
from isthmus.simulator.merging import FragmentBytes, MergingSimulation, ReplicaModel
from isthmus.units import format_bandwidth, format_duration, format_share, format_size

LINK_SHARE = 0.5
"""Share of a link's time that changes may take: the rest is for late ones, and for messages of pipelines."""
SIMULATED_MERGES = 40  # merges that are simulated of each period that is tried


class _Load(NamedTuple):
    link_s: float
    bytes_per_s: float
    size_bytes: int
    name: str

    def text(self, period_s: float) -> str:
        return (
            f"the link of {self.name}, {format_bandwidth(self.bytes_per_s)}, carries {format_size(self.size_bytes)} "
            f"in {format_duration(self.link_s)} of {format_duration(period_s)}"
        )


def with_period(job: Job, models: Sequence[ReplicaModel], sizes: FragmentBytes) -> tuple[Job, str]:
    """The job with its period as a number, and why it is that; the job as it is, and nothing, where it is one already.
    UserError where no period of the run is long enough for the links."""
    if job.sync.period != "auto":
        return job, ""
    training = job.training
    batch_s = batch_seconds(job, models)
    slowest = max(_loads(models, sizes), default=None)
    least = 1 if slowest is None else max(1, math.ceil(slowest.link_s / (LINK_SHARE * batch_s)))
    if slowest is not None and least > training.steps:
        raise UserError(
            f"sync.period: got 'auto', expected faster links or a longer run: {slowest.text(training.steps * batch_s)} "
            f"that the run takes, expected {format_share(LINK_SHARE)} at most"
        )
    period, late = _in_time(lambda p: late_of(job, p, models, sizes), least, training.steps)
    reasons = [slowest.text(period * batch_s)] if slowest is not None else []
    if late:
        reasons.append(
            f"with {late.period}, {late.contributions} contributions to {SIMULATED_MERGES} merges would be too late"
        )
    return _planned(job, period), f"period {period}: {'; '.join(reasons) or 'no link is in use'}"


def busiest_link(job: Job, models: Sequence[ReplicaModel], sizes: FragmentBytes) -> str:
    """Return what the slowest link of a replica carries in a period, in words; nothing where no link is in use."""
    loads = max(_loads(models, sizes), default=None)
    return "" if loads is None else loads.text(job.sync.every * batch_seconds(job, models))


def batch_seconds(job: Job, models: Sequence[ReplicaModel]) -> float:
    """Return the time in which all replicas together train on a batch."""
    return job.training.batch_size / sum(model.samples / model.step_s for model in models)


class _Late(NamedTuple):
    period: int
    contributions: int


def _in_time(late: Callable[[int], int], least: int, most: int) -> tuple[int, _Late | None]:
    """A period from `least` to `most` with no late contribution, and the one before, which has some; `least` where it
    has none, or where none of those that were tried is without."""
    if not (count := late(least)):
        return least, None
    below, high = _Late(least, count), least
    while count:
        if high == most:
            return least, _Late(least, late(least))
        high = min(2 * high, most)
        count = late(high)
        below = _Late(high, count) if count else below
    while high - below.period > 1:
        middle = (below.period + high) // 2
        if count := late(middle):
            below = _Late(middle, count)
        else:
            high = middle
    return high, below


def late_of(job: Job, period: int, models: Sequence[ReplicaModel], sizes: FragmentBytes) -> int:
    """Contributions that come after their merge has ended, with this period and without faults."""
    rules = merge_rules(_planned(job, period))
    some = msgspec.structs.replace(rules, samples=math.ceil(SIMULATED_MERGES * rules.merge_every))
    return MergingSimulation(some, models, sizes).run().late


def _planned(job: Job, period: int) -> Job:
    return msgspec.structs.replace(job, sync=msgspec.structs.replace(job.sync, period=period))


def _loads(models: Sequence[ReplicaModel], sizes: FragmentBytes) -> Iterator[_Load]:
    for model in models:
        for link, size_bytes in ((model.up, sum(sizes.delta)), (model.down, sum(sizes.change))):
            if link is not None:
                seconds = size_bytes / link.bandwidth_bytes_per_s
                yield _Load(seconds, link.bandwidth_bytes_per_s, size_bytes, model.name)
