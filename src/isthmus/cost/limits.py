"""Constraints of a pipeline: where the data are read, where labels stay, and how many micro-batches each stage may
hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from isthmus.cost.problem import Problem
from isthmus.cost.steptime import PipelineTime
from isthmus.plans import classic_in_flight

MOST_TIMED = 512  # micro-batches of a step by which choices are compared: more take seconds, and differ by less
A_LITTLE = 1.001  # times the shortest step, that fewer in flight may take


def broken_constraint(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> str | None:
    """The first constraint that a replica violates, in words; None if it violates none."""
    if problem.constraints.lacking and (broken := _lacked(problem, order, boundaries)) is not None:
        return broken
    holders = problem.constraints.data_holders
    if not holders:
        return None
    if problem.constraints.copied and (broken := _broken_copies(problem, order, boundaries)) is not None:
        return broken
    if order[0] not in holders:
        return f"data_holder: the first stage reads the data and is on {order[0]}, expected {_one_of(holders)}"
    last_start = problem.last_start
    if last_start is None or not boundaries:
        return None
    if order[-1] not in holders:
        return f"labels_stay: the last stage takes the labels and is on {order[-1]}, expected {_one_of(holders)}"
    if boundaries[-1] > last_start:
        return f"labels_stay: the last stage starts at operator {boundaries[-1]}, but labels are taken at {last_start}"
    return None


def _lacked(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> str | None:
    ends = (0, *boundaries, len(problem.flow.operators))
    for device, (first, end) in zip(order, itertools.pairwise(ends), strict=True):
        if targets := problem.lacked(device, first, end):
            return f"operators: device {device} lacks {', '.join(targets)}, which its stage computes"
    return None


def _broken_copies(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> str | None:
    """Where all holders run a copy of the first stage, and where labels stay of the last."""
    first, *others = problem.constraints.feeders
    between = order[1:-1] if problem.constraints.labels_stay else order[1:]
    if order[0] != first or (problem.constraints.labels_stay and order[-1] != first):
        end = "first" if order[0] != first else "last"
        place = order[0] if end == "first" else order[-1]
        return f"data_holder: the {end} stage is on {place}, expected {first}, the first of the holders that feed it"
    if taken := [name for name in between if name in (first, *others)]:
        return f"data_holder: {taken[0]} feeds the chain with its own data and runs another stage too, expected none"
    ends = boundaries[0] if boundaries else len(problem.flow.operators)
    begins = boundaries[-1] if boundaries and problem.constraints.labels_stay else len(problem.flow.operators)
    if written := [k for k in problem.written if k < ends or k >= begins]:
        return (
            f"data_holder: operator {written[0]} writes a buffer, as batch norm does its running statistics, and has "
            f"copies on {len(others) + 1} holders, each of which sees only its own samples: expected it in a stage "
            "without copies"
        )
    return None


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


class MemoryRoom(NamedTuple):
    """The memory that a stage needs on its device, in bytes."""

    capacity: int  # bytes of the device that plans may use
    fixed: int  # whatever is in flight
    each: int  # per micro-batch in flight


def in_flight_limits(problem: Problem, times: PipelineTime, rooms: Sequence[MemoryRoom]) -> tuple[int, ...]:
    """Micro-batches that each stage may hold.

    GPipe holds all. 1F1B holds what the classic schedule does, or as many as hide the round trip behind the period,
    whichever is more, as far as memory goes; fewer than classic throttle the pipeline. It holds more, up to all, where
    the steady step is shorter for it: as backward comes first, gradients that have queued up at a stage keep those
    behind it without work. (Where no recurrence has that step it holds twice as many.) The last stage holds one: its
    backward waits for no gradient, and comes before the next forward. Where weight gradients are apart each stage holds
    as many more as could wait for the end of the step, as far as memory goes: what waits there keeps no other stage
    waiting. (The formula counts none of the last two; the simulator does.)
    """
    classic = classic_in_flight(problem.schedule, len(times.devices), problem.micro_batches)
    if problem.schedule == "gpipe":
        return classic
    period = times.bottleneck[0]
    most = times.steps * problem.micro_batches
    hiding = [math.ceil(r / period) + times.steps if period else most for r in times.round_trips_s]
    hiding[-1] = 1
    if times.apart_s:
        late_s = [a or b for a, b in zip(times.apart_s, times.backward_s, strict=True)]
        hiding = [h + (math.ceil(times.fill_s / late) if late else 0) for h, late in zip(hiding, late_s, strict=True)]

    if times.apart_s:
        parts: tuple[float, ...] = (1,)
    elif times.steps > 1 or len(times.stages_of) < len(times.devices) or problem.constraints.copied:
        parts = (2,)
    else:
        parts = (1, 1.5, 2, most)
    choices = dict[tuple[int, ...], None]()
    for part in parts:
        wanted = [*(math.ceil(part * h) for h in hiding[:-1]), hiding[-1]]
        found = [min(max(c, w), most) for c, w in zip(classic, wanted, strict=True)]
        for stages in times.stages_of.values():
            _fit(found, stages, times.round_trips_s, rooms)
        choices[tuple(found)] = None
    if len(choices) == 1:
        return next(iter(choices))
    steps_s = {held: times.steady_s(held, min(problem.micro_batches, MOST_TIMED)) for held in choices}
    return next(held for held, step_s in steps_s.items() if step_s <= min(steps_s.values()) * A_LITTLE)


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
