"""What a plan costs: compute, transfer, memory, and the time of a step."""

from isthmus.cost.assemble import Layout, Placement, build_plan, build_replicas, layouts_of, place, with_sync
from isthmus.cost.compressed import with_edges
from isthmus.cost.price import Price, step_price
from isthmus.cost.problem import OPTIMIZER_TENSORS, ParameterState, Problem, SyncPolicy, parameter_state
from isthmus.cost.steptime import EdgeTime, Pipeline, in_flight_limits

__all__ = [
    "OPTIMIZER_TENSORS", "EdgeTime", "Layout", "ParameterState", "Pipeline", "Placement", "Price", "Problem",
    "SyncPolicy", "build_plan", "build_replicas", "in_flight_limits", "layouts_of", "parameter_state", "place",
    "step_price", "with_edges", "with_sync",
]  # fmt: skip
