"""The sync planners by name. A planner is a function from a `SyncProblem` to a `SyncPlan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from isthmus.errors import unknown_name
from isthmus.planners.sync.baselines import dream_brute, equal_number
from isthmus.planners.sync.dream import dream
from isthmus.planners.sync.dream_dfs import dream_dfs
from isthmus.planners.sync.dream_spread import dream_spread
from isthmus.planners.sync.problem import SyncProblem
from isthmus.plans.sync import SyncPlan

SyncPlanner = Callable[[SyncProblem], SyncPlan]

_PLANNERS: Mapping[str, SyncPlanner] = {
    "dream": dream,
    "dream-brute": dream_brute,
    "dream-dfs": dream_dfs,
    "dream-spread": dream_spread,
    "equal-number": equal_number,
}


def sync_planner_names() -> list[str]:
    """Every name that `plan_sync` takes, sorted."""
    return sorted(_PLANNERS)


def describe_sync(name: str) -> str:
    """One line on what a sync planner does. Raises UserError for an unknown name."""
    return (inspect.getdoc(_planner(name)) or "").partition("\n")[0]


def plan_sync(name: str, problem: SyncProblem) -> SyncPlan:
    """The plan that the planner makes. Raises UserError for an unknown planner, or a problem too large for it."""
    return _planner(name)(problem)


def _planner(name: str) -> SyncPlanner:
    if name not in _PLANNERS:
        raise unknown_name("sync planner", name, _PLANNERS)
    return _PLANNERS[name]
