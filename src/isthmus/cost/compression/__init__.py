"""How much each message of a pipeline is compressed: ratio planners, one per file, and their registry."""

from isthmus.cost.compression.registry import (
    RatioPlanner,
    as_requested,
    describe_ratios,
    least_bytes,
    packs_alike,
    ratio_planner_names,
    uniform_codecs,
)

__all__ = [
    "RatioPlanner",
    "as_requested",
    "describe_ratios",
    "least_bytes",
    "packs_alike",
    "ratio_planner_names",
    "uniform_codecs",
]
