"""The plan document and its schedules."""

from isthmus.plans.collective import Collective
from isthmus.plans.constraints import (
    ANY_PLAN,
    CompressionConfig,
    Constraints,
    Objective,
    OwnSamples,
    is_of_any_plan,
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
from isthmus.plans.privacy import SPENT, ActivationNoise, PrivacySpent, SampleRange, format_epsilon, read_spent
from isthmus.plans.schedule import SCHEDULES, Schedule, Tasklet, classic_in_flight
from isthmus.plans.sync import SyncIteration, SyncPlan, SyncWorker

__all__ = [
    "ANY_PLAN",
    "SCHEDULES",
    "SPENT",
    "ActivationNoise",
    "Averages",
    "Certificate",
    "Collective",
    "Compression",
    "CompressionConfig",
    "Constraints",
    "Edge",
    "Objective",
    "OuterOptimizer",
    "OwnSamples",
    "Packing",
    "Plan",
    "PlanPeriod",
    "Prediction",
    "PrivacySpent",
    "Replica",
    "ReplicaSync",
    "SampleRange",
    "Schedule",
    "SharedParameter",
    "Stage",
    "StageMemory",
    "SyncGroup",
    "SyncIteration",
    "SyncPlan",
    "SyncWorker",
    "Tasklet",
    "classic_in_flight",
    "format_epsilon",
    "is_of_any_plan",
    "load_plan",
    "question_in_words",
    "read_spent",
    "save_plan",
]
