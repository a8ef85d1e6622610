"""How much each message of a pipeline is compressed: ratio planners, one per file, and their registry."""

from isthmus.cost.compression.registry import RatioPlanner, describe_ratios, ratio_planner_names
from isthmus.cost.compression.requested import as_requested, harshest_codec, least_bytes, packs_alike

__all__ = [
    "RatioPlanner",
    "as_requested",
    "describe_ratios",
    "harshest_codec",
    "least_bytes",
    "packs_alike",
    "ratio_planner_names",
]
