"""The plan document and its schedules."""

from isthmus.plans.collective import Collective
from isthmus.plans.constraints import (
    ANY_PLAN,
    CompressionConfig,
    Constraints,
    LackingOperators,
    Objective,
    OwnSamples,
    bounded_plans,
    question_in_words,
)
from isthmus.plans.exchanges import OuterOptimizer
from isthmus.plans.packing import Compression, Packing
from isthmus.plans.plan import (
    Averages,
    Certificate,
    Edge,
    Plan,
    PlanPeriod,
    Prediction,
    Replica,
    ReplicaSync,
    SharedParameter,
    Stage,
    StageMemory,
    SyncGroup,
    load_plan,
    save_plan,
)
from isthmus.plans.schedule import CHOICES, SCHEDULES, Schedule, classic_in_flight, schedule_of
from isthmus.plans.sync import SyncIteration, SyncPlan, SyncWorker

__all__ = [
    "ANY_PLAN",
    "CHOICES",
    "SCHEDULES",
    "Averages",
    "Certificate",
    "Collective",
    "Compression",
    "CompressionConfig",
    "Constraints",
    "Edge",
    "LackingOperators",
    "Objective",
    "OuterOptimizer",
    "OwnSamples",
    "Packing",
    "Plan",
    "PlanPeriod",
    "Prediction",
    "Replica",
    "ReplicaSync",
    "Schedule",
    "SharedParameter",
    "Stage",
    "StageMemory",
    "SyncGroup",
    "SyncIteration",
    "SyncPlan",
    "SyncWorker",
    "bounded_plans",
    "classic_in_flight",
    "load_plan",
    "question_in_words",
    "save_plan",
    "schedule_of",
]
