"""The baseline of Sky Computing and FusionLLM: the same number of operators on every device, in fleet order."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from isthmus.cost import Problem, build_plan
from isthmus.plan import Plan
from isthmus.planners.blocks import legal_places


def even(problem: Problem) -> Plan:
    """Stages of equal operator count, each cut moved to the nearest place where one is legal.

    Uses fewer devices than the fleet has where there are fewer places to cut. Raises FleetTooSmall.
    """
    boundaries = even_boundaries(legal_places(problem), len(problem.flow.operators), len(problem.fleet.devices))
    order = problem.fleet.names[: len(boundaries) + 1]
    why = dict.fromkeys(problem.fleet.names[len(order) :], "the model has no further place to cut")
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
