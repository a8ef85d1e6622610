"""Which layers to average in which iteration: DreamDDP's schedules. The first line of a planner's docstring describes
it."""

from collections.abc import Mapping

from isthmus.errors import unknown_name
from isthmus.planners.sync.baselines import dream_brute, dream_dfs, equal_number
from isthmus.planners.sync.dream import dream, dream_spread
from isthmus.planners.sync.fusion import Fusion, by_size, fused, sent
from isthmus.planners.sync.problem import SyncPlanner, SyncProblem, WorkerProfile
from isthmus.plans.sync import SyncPlan

__all__ = [
    "SYNC_PLANNERS",
    "Fusion",
    "SyncProblem",
    "WorkerProfile",
    "by_size",
    "fused",
    "plan_sync",
    "sent",
]

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
