"""Which stages run their forward again before their backward, and keep only what they received in between.

That costs a stage its forward once more per micro-batch, and leaves room for more micro-batches in flight (activation
checkpointing, Chen et al. 2016, with a stage as the segment). So it pays where memory throttles the pipeline, or where
the schedule fixes the number in flight and nothing else fits.
"""

from __future__ import annotations

import itertools

from isthmus.cost.limits import in_flight_limits
from isthmus.cost.placement import Placement, recomputing, room_of_each, shortages

MOST_SHARING = 8
"""Stages up to which every choice is tried where two are on one device."""
ROUNDING = 1e-12
"""Relative: a step that is shorter by no more is as long."""


def fastest(placed: Placement) -> Placement:
    """The placement with the stages recomputing that make its step shortest, in the closed form.

    Begin with the stages that do not fit otherwise. More of them only lengthen the fill and the round trips. So to beat
    the best choice yet takes a period below the one with which this fill would tie; a stage whose round trip over the
    micro-batches that it holds is not below must recompute in every such choice, and a device or link that is busy for
    longer ends the search. Adding just these stages misses nothing, and takes no more rounds than there are stages.

    That is exact where every stage has a device of its own. Where two share one's memory, all choices are tried, up to
    `MOST_SHARING` stages.
    """
    if not placed.problem.recompute:
        return placed
    if len(placed.times.stages_of) < len(placed.order) <= MOST_SHARING:
        return _best_of_all(placed)
    count = placed.problem.micro_batches
    short = shortages(placed, room_of_each(placed))
    now = recomputing(placed, [name in short for name in placed.order])
    best, best_s = now, float("inf")
    while True:
        limits = _limits(now)
        if limits is None:
            return best
        period_s = now.times.throttled_period_s(limits, count)
        step_s = now.times.step_s(count, period_s)
        if step_s < best_s * (1 - ROUNDING):
            best, best_s = now, step_s
        if count == 1:
            return best
        tie_s = min(period_s, period_s - (step_s - best_s) / (count - 1))
        held_up = now.times.held_up_s(limits, count)
        must = [held_up.get(stage, 0.0) >= tie_s for stage in range(len(limits))]
        stuck = any(m and chosen for m, chosen in zip(must, now.recompute, strict=True))
        if stuck or now.times.bottleneck[0] >= tie_s:
            return best
        now = recomputing(now, [m or chosen for m, chosen in zip(must, now.recompute, strict=True)])


def _best_of_all(placed: Placement) -> Placement:
    if _step_s(placed) <= placed.times.step_s(placed.problem.micro_batches):
        return placed  # nothing throttles it, and all else is slower
    choices = itertools.product((False, True), repeat=len(placed.order))
    return min((recomputing(placed, chosen) for chosen in choices), key=_step_s)


def _step_s(placed: Placement) -> float:
    """Infinite where it does not fit."""
    limits, count = _limits(placed), placed.problem.micro_batches
    if limits is None:
        return float("inf")
    return placed.times.step_s(count, placed.times.throttled_period_s(limits, count))


def _limits(placed: Placement) -> tuple[int, ...] | None:
    """Micro-batches in flight per stage; None where it does not fit."""
    found = room_of_each(placed)
    return None if shortages(placed, found) else in_flight_limits(placed.problem, placed.times, found)
