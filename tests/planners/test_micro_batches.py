"""Into how many micro-batches a batch is cut: the best of the counts that are allowed, and a bound over all."""

from __future__ import annotations

import contextlib

import pytest
from plan_cases import fleet_of, problem_of, random_graph

from isthmus.cost import Problem
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners import over_counts, plan
from isthmus.plans import Plan


def problem_with(latency_seed: int, memory: int | None = None, schedule: str = "1f1b") -> Problem:
    fleet = fleet_of([3.0, 5.0, 2.0], latency_seed, memory=None if memory is None else [memory] * 3)
    return problem_of(random_graph(latency_seed, 5), fleet, micro_batches=6, schedule=schedule)


def auto(problem: Problem) -> Plan:
    return plan("auto", problem)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_count_is_taken_and_bounded_over_all(seed: int) -> None:
    problem, counts = problem_with(seed), (12, 1, 3, 6)
    each = [auto(problem.cut_into(count)) for count in counts]
    chosen = over_counts(problem, counts, auto, None)
    assert chosen.predicted.step_s == min(made.predicted.step_s for made in each)
    assert chosen.batch == 12
    assert chosen.certificate is None
    assert f"{chosen.micro_batches} are best" in chosen.notes[0]


def test_who_judges_better_decides() -> None:
    problem = problem_with(1)
    fewest = over_counts(problem, (12, 2, 1), auto, lambda made: float(made.micro_batches))
    assert fewest.micro_batches == 1


def fitting_counts(memory: int) -> tuple[Problem, list[int]]:
    problem, found = problem_with(3, memory, "gpipe"), list[int]()
    for count in (1, 2, 12):
        with contextlib.suppress(FleetTooSmall):
            found.append(auto(problem.cut_into(count)).micro_batches)
    return problem, found


def test_counts_with_which_nothing_fits_are_passed_over() -> None:
    tight, fitting = next((p, fit) for p, fit in map(fitting_counts, range(200, 6000, 200)) if 0 < len(fit) < 3)
    assert over_counts(tight, (1, 2, 12), auto, None).micro_batches in fitting
    with pytest.raises(FleetTooSmall):
        over_counts(problem_with(3, 10), (1, 12), auto, None)


def test_a_count_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(UserError, match="micro_batches: got 5, expected a divisor of the batch, which is 12"):
        over_counts(problem_with(0), (5,), auto, None)
