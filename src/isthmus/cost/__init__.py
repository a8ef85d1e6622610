"""What a plan costs: compute, transfer, memory, and the time of a step."""

from isthmus.cost.assemble import Layout, build_again, build_plan, build_replicas, layouts_of, with_sync
from isthmus.cost.compressed import plan_compression, repeat_compression, with_edges
from isthmus.cost.in_flight import Room, in_flight_limits
from isthmus.cost.placement import Placement, place
from isthmus.cost.price import Price, is_priced, preference, step_price
from isthmus.cost.problem import OPTIMIZER_TENSORS, ParameterState, Problem, SyncPolicy, parameter_state
from isthmus.cost.respect import broken_term
from isthmus.cost.steptime import EdgeTime, Pipeline

__all__ = [
    "OPTIMIZER_TENSORS", "EdgeTime", "Layout", "ParameterState", "Pipeline", "Placement", "Price", "Problem", "Room",
    "SyncPolicy", "broken_term", "build_again", "build_plan", "build_replicas", "in_flight_limits", "is_priced",
    "layouts_of", "parameter_state", "place", "plan_compression", "preference", "repeat_compression", "step_price",
    "with_edges", "with_sync",
]  # fmt: skip
