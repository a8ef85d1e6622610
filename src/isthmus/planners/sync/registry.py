"""The sync planners by name. A planner is a function from a `SyncProblem` to a `SyncPlan`; the first line of
its docstring describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.errors import unknown_name
from isthmus.planners.sync.baselines import dream_brute, equal_number
from isthmus.planners.sync.dream import dream
from isthmus.planners.sync.dream_dfs import dream_dfs
from isthmus.planners.sync.dream_spread import dream_spread
from isthmus.planners.sync.problem import SyncProblem
from isthmus.plans.sync import SyncPlan

SyncPlanner = Callable[[SyncProblem], SyncPlan]

SYNC_PLANNERS: Mapping[str, SyncPlanner] = {
    "dream": dream,
    "dream-brute": dream_brute,
    "dream-dfs": dream_dfs,
    "dream-spread": dream_spread,
    "equal-number": equal_number,
}


def plan_sync(name: str, problem: SyncProblem) -> SyncPlan:
    """The plan that the planner makes. Raises UserError for an unknown planner, or a problem too large for it."""
    if name not in SYNC_PLANNERS:
        raise unknown_name("sync planner", name, SYNC_PLANNERS)
    return SYNC_PLANNERS[name](problem)
