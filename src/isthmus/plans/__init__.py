"""The plan document and its schedules."""

from isthmus.plans.collective import Collective
from isthmus.plans.compression import Compression
from isthmus.plans.constraints import CompressionConfig, Constraints, Objective, OwnSamples
from isthmus.plans.noise import ActivationNoise
from isthmus.plans.outer import OuterOptimizer
from isthmus.plans.packing import Packing
from isthmus.plans.period import PlanPeriod
from isthmus.plans.plan import (
    Averages,
    Certificate,
    Edge,
    Plan,
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
from isthmus.plans.privacy_spent import SPENT, PrivacySpent, SampleRange, format_epsilon, read_spent
from isthmus.plans.question import ANY_PLAN, is_of_any_plan, question_in_words
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
