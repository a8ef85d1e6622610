"""The ratio planners by name. One is a function from a `Problem`, a `Plan` and a ratio to the compressed `Plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from isthmus.cost import Problem
from isthmus.errors import unknown_name
from isthmus.plan import Plan
from isthmus.planners.compression.adatopk import adatopk
from isthmus.planners.compression.dense import bf16, int8
from isthmus.planners.compression.just_enough import just_enough
from isthmus.planners.compression.uniform import uniform

RatioPlanner = Callable[[Problem, Plan, float], Plan]

_PLANNERS: Mapping[str, RatioPlanner] = {
    "adatopk": adatopk, "bf16": bf16, "int8": int8, "just-enough": just_enough, "uniform": uniform
}  # fmt: skip


def ratio_planner_names() -> list[str]:
    """Every name that `plan_compression` takes, sorted."""
    return sorted(_PLANNERS)


def describe_ratios(name: str) -> str:
    """One line on what a ratio planner does. Raises UserError for an unknown name."""
    return (inspect.getdoc(_planner(name)) or "").partition("\n")[0]


def plan_compression(name: str, problem: Problem, plan: Plan, ratio: float) -> Plan:
    """The plan with compression and a new prediction.

    `ratio` is elements per element that is sent; what it bounds is the planner's. Raises UserError for an unknown
    planner, a ratio below 1 or a plan of another problem.
    """
    return _planner(name)(problem, plan, ratio)


def _planner(name: str) -> RatioPlanner:
    if name not in _PLANNERS:
        raise unknown_name("ratio planner", name, _PLANNERS)
    return _PLANNERS[name]
