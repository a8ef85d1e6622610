"""The one question that a plan's certificate answers, in words: the same for every planner of the same problem."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.plans.constraints import Constraints
from isthmus.units import format_share

ANY_PLAN = "of any plan"


def is_of_any_plan(question: str) -> bool:
    """True if a bound holds for all plans that the job allows, not only for those of one planner."""
    return f" {ANY_PLAN}:" in question


def question_in_words(
    constraints: Constraints, counts: Sequence[int], *, priced: bool, period: int, recompute: bool
) -> str:
    """Which plans a lower bound ranges over, and what it bounds.

    `counts` are the numbers of micro-batches that a plan may choose from; `priced` tells whether the bound is one on
    the price of a step; `period` is that of averaging, in steps.
    """
    conditions = [f"{_or(counts)} micro-batch{'' if tuple(counts) == (1,) else 'es'} per step"]
    if period > 1:
        conditions.append(f"every parameter averaged once in {period} steps")
    if constraints.max_step_s is not None:
        conditions.append(f"a step of at most {constraints.max_step_s:g} s")
    if constraints.max_price is not None:
        conditions.append(f"at most {constraints.max_price:g} for 1,000 steps")
    if constraints.copied:
        labels = ", labels too" if constraints.labels_stay else ""
        conditions.append(f"{' and '.join(constraints.feeders)} feeding it, each with its own data{labels}")
    elif constraints.data_holders:
        conditions.append(
            f"data on {_or(constraints.data_holders)} only{', labels too' if constraints.labels_stay else ''}"
        )
    if constraints.memory_headroom:
        conditions.append(f"{format_share(constraints.memory_headroom)} of each device's memory left free")
    if constraints.compression is not None:
        conditions.append(f"messages packed by {constraints.compression}")
    if not recompute:
        conditions.append("no recomputing")
    return (
        f"the {'price' if priced else 'time'} of a step {ANY_PLAN}: any number of replicas, any devices in any order, "
        f"any cuts and any shares of the batch, {', '.join(conditions)}, by the closed form"
    )


def _or(items: Sequence[object]) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
