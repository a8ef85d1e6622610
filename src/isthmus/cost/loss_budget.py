"""A loss budget is the whole plan's: replicas over fast links leave it to those over slow ones.

The expected loss of a plan is the mean over its samples, so a replica's increase counts by its share of the batch, and
one that packs nothing leaves its part to others. A higher loss takes more steps, so the codecs are those of the least
time to a loss:

    the least  (T + averaging) * more_steps(x)
    where  x = sum over r of m_r / n * (the least increase of replica r with a step of at most T)  <=  budget
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from isthmus.cost.compression.just_enough import choices_within
from isthmus.cost.compression.messages import Sender, packed_edges
from isthmus.cost.compression.registry import with_asked_feedback
from isthmus.cost.limits import in_flight_limits
from isthmus.cost.placement import Placement, rooms
from isthmus.cost.steptime import pipeline, prediction
from isthmus.expected_loss import more_steps, packed_increase


class _Packed(NamedTuple):
    """One replica under one choice of codecs."""

    step_s: float
    increase: float
    """Expected, of the plan: the replica's times its share of the batch."""
    placed: Placement


def within_budget(placed: Sequence[Placement], averaging_s: float) -> list[Placement]:
    """The replicas of a plan with the codecs of the least time to a loss that its budget allows, where averaging takes
    so many seconds of a step. As they are where no budget is asked for."""
    asked = placed[0].problem.constraints.compression
    if asked is None or asked.loss_budget is None:
        return list(placed)
    count = sum(p.problem.micro_batches for p in placed)
    options = [(number, option) for number, p in enumerate(placed) for option in _options(p, asked.loss_budget, count)]
    mildest: dict[int, _Packed] = {}
    best: tuple[float, list[_Packed]] = math.inf, []
    for number, option in sorted(options, key=lambda pair: (pair[1].step_s, pair[1].increase)):
        if number in mildest and mildest[number].increase <= option.increase:
            continue
        mildest[number] = option
        increase = sum(o.increase for o in mildest.values())
        if len(mildest) == len(placed) and increase <= asked.loss_budget:
            step_s = max(o.step_s for o in mildest.values()) + averaging_s
            if step_s * more_steps(increase) < best[0]:
                best = step_s * more_steps(increase), [mildest[r] for r in range(len(placed))]
    return [option.placed for option in best[1]]


def _options(placed: Placement, budget: float, count: int) -> Iterator[_Packed]:
    """Messages as they are among them. The batch has `count` micro-batches."""
    problem = placed.problem
    asked = problem.constraints.compression
    assert asked is not None, "a budget is one of compression"
    sender = Sender(placed.order, placed.edges, max(placed.times.device_s.values()))
    for packings in choices_within(problem, sender, asked.ratio, budget):
        edges = with_asked_feedback(asked, packed_edges(sender, packings))
        times = pipeline(problem, placed.order, placed.flops, edges, placed.shared)
        made = replace(placed, edges=edges, times=times)
        step_s = prediction(times, in_flight_limits(problem, times, rooms(made)), problem.micro_batches).step_s
        yield _Packed(step_s, packed_increase(edges) * problem.micro_batches / count, made)
