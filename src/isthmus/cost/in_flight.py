"""How many micro-batches each stage may hold between their forward and their backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from isthmus.cost.problem import Problem
from isthmus.cost.steptime import PipelineTime
from isthmus.plans import classic_in_flight


class MemoryRoom(NamedTuple):
    """The memory that a stage needs on its device, in bytes."""

    capacity: int
    """What plans may use of the device."""
    fixed: int
    """Whatever is in flight."""
    each: int
    """Per micro-batch in flight."""


def in_flight_limits(problem: Problem, times: PipelineTime, rooms: Sequence[MemoryRoom]) -> tuple[int, ...]:
    """Micro-batches that each stage may hold.

    GPipe holds all. 1F1B holds what the classic schedule does, or as many as hide the round trip behind the
    period, whichever is more, as far as memory goes; fewer than classic throttle the pipeline. The last stage holds
    one: its backward waits for no gradient, and comes before the next forward.
    """
    classic = classic_in_flight(problem.schedule, len(times.devices), problem.micro_batches)
    if problem.schedule == "gpipe":
        return classic
    period = times.bottleneck[0]
    hiding = [math.ceil(r / period) + 1 if period else problem.micro_batches for r in times.round_trips_s]
    hiding[-1] = 1
    found = [min(max(c, h), problem.micro_batches) for c, h in zip(classic, hiding, strict=True)]
    for stages in times.stages_of.values():
        _fit(found, stages, times.round_trips_s, rooms)
    return tuple(found)


def _fit(found: list[int], stages: Sequence[int], round_trips_s: Sequence[float], rooms: Sequence[MemoryRoom]) -> None:
    """Take away what the memory of one device does not hold, where it throttles the least; one each is left."""
    free = rooms[stages[0]].capacity - sum(rooms[s].fixed for s in stages)
    if len(stages) == 1:
        (s,) = stages
        if rooms[s].each:
            found[s] = max(1, min(found[s], free // rooms[s].each))
        return
    while sum(found[s] * rooms[s].each for s in stages) > free:
        spare = [s for s in stages if found[s] > 1 and rooms[s].each]
        if not spare:
            return
        found[min(spare, key=lambda s: round_trips_s[s] / (found[s] - 1))] -= 1
