"""The baseline of Sky Computing and FusionLLM: the same number of operators on every device, in fleet order."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import legal_places
from isthmus.plans import Plan


def even(problem: Problem) -> Plan:
    """Stages of equal operator count, each cut moved to the nearest place where one is legal.

    Uses fewer devices than the fleet has where there are fewer places to cut. A data holder is moved to the front, and
    runs the last stage too where labels stay. Raises FleetTooSmall.
    """
    names: tuple[str, ...] = problem.fleet.names
    places = legal_places(problem)
    holders, last_start = problem.constraints.data_holders, problem.last_start
    feeders = problem.constraints.feeders  # all of them run what the first does
    first = next(name for name in names if name in (feeders[:1] or holders or names))
    names = (first, *(name for name in names if name != first and name not in feeders))
    if last_start is not None and len(names) > 1:  # a data holder comes again at the end
        names, places = (*names, first), [place for place in places if place <= last_start]
    boundaries = even_boundaries(places, len(problem.flow.operators), len(names))
    order = names[: len(boundaries) + 1]
    if last_start is not None:
        order = (*order[:-1], first) if len(order) > 2 else (first,)
        boundaries = boundaries if len(order) > 1 else []
    why = dict.fromkeys(set(names) - set(order) - set(feeders), "the model has no further place to cut")
    return build_plan(problem, order, boundaries, planner="even", notes=why)


def even_boundaries(places: Sequence[int], operators: int, stages: int) -> list[int]:
    """At most `stages - 1` of the legal `places`: each the nearest to its share that leaves places for the others."""
    wanted = min(stages - 1, len(places))
    chosen: list[int] = []
    start = 0
    for k in range(1, wanted + 1):
        end = len(places) - (wanted - k)
        target = k * operators / (wanted + 1)
        index = bisect.bisect_left(places, target, start, end)
        near = [i for i in (index - 1, index) if start <= i < end]
        best = min(near, key=lambda i: abs(places[i] - target))
        chosen.append(places[best])
        start = best + 1
    return chosen
