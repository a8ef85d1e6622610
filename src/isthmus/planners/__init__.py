"""Planners decide which device computes what, and in which order: one algorithm per file, and their registry."""

from isthmus.cost.blocks import legal_places
from isthmus.planners.micro_batches import INTERRUPTED, over_counts
from isthmus.planners.observer import SearchObserver, SearchStopped, cut_short, keep, looked_at, observed_by
from isthmus.planners.registry import (
    ABILITIES,
    ENTRY_POINTS,
    Capabilities,
    Planner,
    abilities,
    capabilities,
    check_constraints,
    check_planner,
    describe,
    plan,
    planner_names,
    scheduled,
)
from isthmus.planners.whole_replicas import whole_replicas

__all__ = [
    "ABILITIES",
    "ENTRY_POINTS",
    "INTERRUPTED",
    "Capabilities",
    "Planner",
    "SearchObserver",
    "SearchStopped",
    "abilities",
    "capabilities",
    "check_constraints",
    "check_planner",
    "cut_short",
    "describe",
    "keep",
    "legal_places",
    "looked_at",
    "observed_by",
    "over_counts",
    "plan",
    "planner_names",
    "scheduled",
    "whole_replicas",
]
