"""The plan document and its schedules."""

from isthmus.plans.collective import Collective
from isthmus.plans.compression import Compression
from isthmus.plans.noise import ActivationNoise
from isthmus.plans.outer import Outer
from isthmus.plans.packing import Packing
from isthmus.plans.period import PlanPeriod
from isthmus.plans.plan import (
    Averages,
    Certificate,
    Edge,
    Plan,
    Prediction,
    Replica,
    SharedParameter,
    Stage,
    StageMemory,
    Sync,
    SyncGroup,
    load_plan,
    save_plan,
)
from isthmus.plans.question import ANY_PLAN, is_of_any_plan, question_in_words
from isthmus.plans.schedule import SCHEDULES, Schedule, Tasklet, classic_in_flight
from isthmus.plans.spent import SPENT, Spent, Stretch, format_epsilon, read_spent
from isthmus.plans.sync import SyncIteration, SyncPlan, SyncWorker
from isthmus.plans.terms import CompressionConfig, Objective, OwnSamples, Terms

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
    "Edge",
    "Objective",
    "Outer",
    "OwnSamples",
    "Packing",
    "Plan",
    "PlanPeriod",
    "Prediction",
    "Replica",
    "Schedule",
    "SharedParameter",
    "Spent",
    "Stage",
    "StageMemory",
    "Stretch",
    "Sync",
    "SyncGroup",
    "SyncIteration",
    "SyncPlan",
    "SyncWorker",
    "Tasklet",
    "Terms",
    "classic_in_flight",
    "format_epsilon",
    "is_of_any_plan",
    "load_plan",
    "question_in_words",
    "read_spent",
    "save_plan",
]  # fmt: skip
