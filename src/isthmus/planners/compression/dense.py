"""All elements of every message, each in fewer bytes."""

from __future__ import annotations

from isthmus.cost import Problem
from isthmus.plan import Packing, Plan
from isthmus.planners.compression.messages import compressed, messages_of


def bf16(problem: Problem, plan: Plan, ratio: float) -> Plan:
    """Two bytes for every element of every message; the ratio does not matter, but is checked."""
    return _dense("bf16", problem, plan, ratio)


def int8(problem: Problem, plan: Plan, ratio: float) -> Plan:
    """One byte for every element, and a scale for each 256 of them; the ratio does not matter, but is checked."""
    return _dense("int8", problem, plan, ratio)


def _dense(codec: str, problem: Problem, plan: Plan, ratio: float) -> Plan:
    Packing(codec="topk", ratio=ratio)
    packings = dict.fromkeys(messages_of(problem, plan), Packing(codec=codec))
    return compressed(problem, plan, packings, planner=codec)
