"""Every message packed by the same codec, whatever the plan."""

from __future__ import annotations

from isthmus.cost.compression.messages import Packings, Sender, stage_messages_of
from isthmus.cost.problem import Problem
from isthmus.plans import Packing


def uniform(problem: Problem, sender: Sender, ratio: float) -> Packings:
    """Top-K at the same ratio on every message (FusionLLM, section 5.1, the baseline of section 7).

    Of every `ratio` elements one is sent, in 3.07 bytes at 100: 130 times less of float32. The paper's 12 bytes made
    that 33. Raises UserError for a ratio below 1.
    """
    return dict.fromkeys(stage_messages_of(problem, sender), Packing(codec="topk", ratio=ratio))


def dense(codec: str, problem: Problem, sender: Sender, _ratio: float) -> Packings:
    """Every element of every message, by one codec; the ratio does not matter."""
    return dict.fromkeys(stage_messages_of(problem, sender), Packing(codec=codec))
