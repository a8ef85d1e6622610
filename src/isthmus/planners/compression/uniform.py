"""FusionLLM's baseline: every message sparsified alike."""

from __future__ import annotations

from isthmus.cost import Problem
from isthmus.plan import Plan
from isthmus.planners.compression.codecs import topk
from isthmus.planners.compression.messages import compressed, messages_of


def uniform(problem: Problem, plan: Plan, ratio: float) -> Plan:
    """Top-K at the same ratio on every message (FusionLLM, section 5.1, the baseline of section 7).

    A kept element takes 12 bytes, so ratio 100 sends 33.3 times less, and a ratio up to 3 nothing less: then messages
    travel as they are. Raises UserError for a ratio below 1 or a plan of another problem.
    """
    codec = topk(ratio)
    return compressed(problem, plan, dict.fromkeys(messages_of(problem, plan), codec), planner="uniform")
