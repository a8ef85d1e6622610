"""Which layers to average in which iteration: DreamDDP's schedules, one algorithm per file, and their registry."""

from isthmus.planners.sync.fusion import Fusion, by_size, fused, sent
from isthmus.planners.sync.problem import SyncProblem, WorkerProfile
from isthmus.planners.sync.registry import describe_sync, plan_sync, sync_planner_names

__all__ = [
    "Fusion",
    "SyncProblem",
    "WorkerProfile",
    "by_size",
    "describe_sync",
    "fused",
    "plan_sync",
    "sent",
    "sync_planner_names",
]
