"""The one question that a plan's certificate answers, in words: the same for every planner of the same problem."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.plans.terms import Terms
from isthmus.units import format_share

ANY_PLAN = "of any plan"


def is_of_any_plan(question: str) -> bool:
    """Whether a bound ranges over all plans that the job allows, and not only over those of one planner's kind."""
    return f" {ANY_PLAN}:" in question


def question_in_words(terms: Terms, counts: Sequence[int], *, priced: bool, period: int, recompute: bool) -> str:
    """Which plans a lower bound ranges over, and what it bounds.

    `counts` are the numbers of micro-batches that a plan may choose from; `priced` tells whether the bound is one on
    the price of a step; `period` is that of averaging, in steps.
    """
    conditions = [f"{_or(counts)} micro-batch{'' if tuple(counts) == (1,) else 'es'} per step"]
    if period > 1:
        conditions.append(f"every parameter averaged once in {period} steps")
    if terms.max_step_s is not None:
        conditions.append(f"a step of at most {terms.max_step_s:g} s")
    if terms.max_price is not None:
        conditions.append(f"at most {terms.max_price:g} for 1,000 steps")
    if terms.copied:
        labels = ", labels too" if terms.labels_stay else ""
        conditions.append(f"{' and '.join(terms.feeders)} feeding it, each with its own data{labels}")
    elif terms.data_holders:
        conditions.append(f"data on {_or(terms.data_holders)} only{', labels too' if terms.labels_stay else ''}")
    if terms.memory_headroom:
        conditions.append(f"{format_share(terms.memory_headroom)} of each device's memory left free")
    if terms.compression is not None:
        conditions.append(f"messages packed by {terms.compression}")
    if not recompute:
        conditions.append("no recomputing")
    return (
        f"the {'price' if priced else 'time'} of a step {ANY_PLAN}: any number of replicas, any devices in any order, "
        f"any cuts and any shares of the batch, {', '.join(conditions)}, by the closed form"
    )


def _or(items: Sequence[object]) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
