"""How much each message of a plan is compressed: ratio planners, one per file, and their registry."""

from isthmus.planners.compression.messages import repeat_compression, with_feedback
from isthmus.planners.compression.registry import (
    RatioPlanner,
    describe_ratios,
    plan_compression,
    ratio_planner_names,
)

__all__ = [
    "RatioPlanner", "describe_ratios", "plan_compression", "ratio_planner_names", "repeat_compression", "with_feedback"
]  # fmt: skip
