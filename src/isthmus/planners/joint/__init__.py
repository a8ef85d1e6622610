"""Whole plans of any number of replicas as arrays: all of them where they are few, descents over them elsewhere."""

from isthmus.planners.joint.descent import Descent
from isthmus.planners.joint.exhaustive_plans import ExhaustiveResult, exhaustive_plan

__all__ = ["Descent", "ExhaustiveResult", "exhaustive_plan"]
