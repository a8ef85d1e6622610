"""Whether a pipeline keeps to the problem's terms: where the data are read, and where labels stay."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cost.problem import Problem


def broken_constraint(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> str | None:
    """The first constraint that a replica violates, in words; None if it violates none."""
    holders = problem.constraints.data_holders
    if not holders:
        return None
    if problem.constraints.copied and (broken := _broken_copies(problem, order, boundaries)) is not None:
        return broken
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


def _broken_copies(problem: Problem, order: Sequence[str], boundaries: Sequence[int]) -> str | None:
    """Where all holders run a copy of the first stage, and where labels stay of the last."""
    first, *others = problem.constraints.feeders
    between = order[1:-1] if problem.constraints.labels_stay else order[1:]
    if order[0] != first or (problem.constraints.labels_stay and order[-1] != first):
        end = "first" if order[0] != first else "last"
        place = order[0] if end == "first" else order[-1]
        return f"data_holder: the {end} stage is on {place}, expected {first}, the first of the holders that feed it"
    if taken := [name for name in between if name in (first, *others)]:
        return f"data_holder: {taken[0]} feeds the chain with its own data and runs another stage too, expected none"
    ends = boundaries[0] if boundaries else len(problem.flow.operators)
    begins = boundaries[-1] if boundaries and problem.constraints.labels_stay else len(problem.flow.operators)
    if written := [k for k in problem.written if k < ends or k >= begins]:
        return (
            f"data_holder: operator {written[0]} writes a buffer, as batch norm does its running statistics, and has "
            f"copies on {len(others) + 1} holders, each of which sees only its own samples: expected it in a stage "
            "without copies"
        )
    return None


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
