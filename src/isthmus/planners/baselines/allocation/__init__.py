"""Sky Computing's layer allocation: the abstract problem and its algorithms.

The planners made of them are in `on_fleet`; they have the names of modules here, so they are not imported here.
"""

from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, Transfers, allocation
from isthmus.planners.baselines.allocation.sky import (
    equal_compute_layers,
    even_layers,
    sky_heuristic_layers,
    sky_optimal_layers,
)

__all__ = [
    "Allocation",
    "LayerProblem",
    "Transfers",
    "allocation",
    "equal_compute_layers",
    "even_layers",
    "sky_heuristic_layers",
    "sky_optimal_layers",
]
