"""What a plan costs: compute, transfer, memory, and the time of a step."""

from isthmus.cost.assemble import Placement, build_plan, place
from isthmus.cost.price import Price, step_price
from isthmus.cost.problem import OPTIMIZER_TENSORS, ParameterState, Problem, parameter_state
from isthmus.cost.steptime import EdgeTime, Pipeline, in_flight_limits

__all__ = [
    "OPTIMIZER_TENSORS", "EdgeTime", "ParameterState", "Pipeline", "Placement", "Price", "Problem",
    "build_plan", "in_flight_limits", "parameter_state", "place", "step_price",
]  # fmt: skip
