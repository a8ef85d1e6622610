"""Whether a pipeline keeps to the problem's terms: where the data are read, and where labels stay."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cost.problem import Problem


def broken_term(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> str | None:
    """What one replica breaks, in words; None where it respects all terms."""
    holders = problem.terms.data_holders
    if not holders:
        return None
    if order[0] not in holders:
        return f"data_holder: the first stage reads the data and is on {order[0]}, expected {_one_of(holders)}"
    last_start = problem.last_start
    if last_start is None or not boundaries:
        return None
    if order[-1] not in holders:
        return f"labels_stay: the last stage takes the labels and is on {order[-1]}, expected {_one_of(holders)}"
    if boundaries[-1] > last_start:
        return f"labels_stay: the last stage starts at operator {boundaries[-1]}, but labels are taken at {last_start}"
    return None


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
