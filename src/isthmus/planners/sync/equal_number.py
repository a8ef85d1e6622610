"""PLSGD-ENP: the paper's baseline, the same number of layers in every iteration."""

from __future__ import annotations

from isthmus.planners.sync.build_sync_plan import intervals, sync_plan
from isthmus.planners.sync.problem import SyncProblem
from isthmus.plans.sync import SyncPlan


def equal_number(problem: SyncProblem) -> SyncPlan:
    """The same number of layers in every iteration, whatever they cost (DreamDDP, Example 1); bubbles filled."""
    ends = equal_ends(len(problem.layers), problem.iterations)
    return sync_plan(problem, "equal-number", intervals(ends), past_gaps=False)


def equal_ends(layers: int, iterations: int) -> tuple[int, ...]:
    """Where each iteration's interval ends. Numbers that do not divide leave one layer more to the first ones."""
    each, more = divmod(layers, iterations)
    return tuple(h * each + min(h, more) for h in range(1, iterations + 1))
