"""How long a stage computes: FLOPs / (lambda * S*)."""

from __future__ import annotations

from isthmus.cost.problem import Problem
from isthmus.graph import StageGraph


def stage_flops(problem: Problem, stage: StageGraph) -> tuple[int, int]:
    """(forward, backward) FLOPs of one micro-batch, nothing recomputed."""
    pairs = [problem.flops(op) for op in stage.ops]
    return sum(f for f, _ in pairs), sum(b for _, b in pairs)


def compute_s(problem: Problem, device: str, flops: float) -> float:
    return flops / problem.fleet.device(device).sustained_flops_per_s
