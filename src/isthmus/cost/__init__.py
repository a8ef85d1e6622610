"""The costs of a plan: compute, transfer, memory, and the time of a step."""

from isthmus.cost.build_plan import PlanLayout, build_plan, build_replicas, layouts_of, with_sync
from isthmus.cost.compressed import build_again, plan_compression, repeat_compression, with_edges
from isthmus.cost.limits import MemoryRoom, broken_constraint, in_flight_limits
from isthmus.cost.placement import Placement, place
from isthmus.cost.price import Price, is_priced, preference, step_price
from isthmus.cost.problem import OPTIMIZER_TENSORS, Decoupled, ParameterState, Problem, SyncPolicy, parameter_state
from isthmus.cost.steptime import EdgeTime, PipelineTime

__all__ = [
    "OPTIMIZER_TENSORS",
    "Decoupled",
    "EdgeTime",
    "MemoryRoom",
    "ParameterState",
    "PipelineTime",
    "Placement",
    "PlanLayout",
    "Price",
    "Problem",
    "SyncPolicy",
    "broken_constraint",
    "build_again",
    "build_plan",
    "build_replicas",
    "in_flight_limits",
    "is_priced",
    "layouts_of",
    "parameter_state",
    "place",
    "plan_compression",
    "preference",
    "repeat_compression",
    "step_price",
    "with_edges",
    "with_sync",
]
