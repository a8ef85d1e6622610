"""The plan document and its schedules."""

from isthmus.plan.collective import Collective
from isthmus.plan.compression import Compression
from isthmus.plan.noise import ActivationNoise
from isthmus.plan.outer import Outer
from isthmus.plan.packing import Packing
from isthmus.plan.period import PlanPeriod
from isthmus.plan.plan import (
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
from isthmus.plan.question import question_in_words
from isthmus.plan.schedule import SCHEDULES, Schedule, Tasklet, classic_in_flight
from isthmus.plan.spent import SPENT, Spent, Stretch, format_epsilon, read_spent
from isthmus.plan.sync import SyncIteration, SyncPlan, SyncWorker
from isthmus.plan.terms import CompressionConfig, Objective, OwnSamples, Terms

__all__ = [
    "SCHEDULES", "SPENT", "ActivationNoise", "Averages", "Certificate", "Collective", "Compression",
    "CompressionConfig", "Edge", "Objective", "Outer", "OwnSamples", "Packing", "Plan", "PlanPeriod", "Prediction",
    "Replica", "Schedule", "SharedParameter", "Spent", "Stage", "StageMemory", "Stretch", "Sync", "SyncGroup",
    "SyncIteration", "SyncPlan", "SyncWorker", "Tasklet", "Terms", "classic_in_flight", "format_epsilon", "load_plan",
    "question_in_words", "read_spent", "save_plan",
]  # fmt: skip
