"""Which layers to average in which iteration: DreamDDP's schedules, one algorithm per file, and their registry."""

from isthmus.planners.sync.fusion import Fusion, by_size, fused, sent
from isthmus.planners.sync.problem import SyncProblem, WorkerProfile
from isthmus.planners.sync.registry import SYNC_PLANNERS, plan_sync

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
