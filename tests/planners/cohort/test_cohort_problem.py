"""Rounds as values: what is refused, and who pays what."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import UserError
from isthmus.option_docs import first_line
from isthmus.planners.cohort import (
    COHORT_ALGORITHMS,
    CohortProblem,
    CohortSchedule,
    parrot,
    schedule_cohort,
)

GOOD = {"sizes": [3.0, 1.0], "seconds_per_sample": [1.0, 2.0], "fixed_s": [0.5, 0.0]}


def problem(**changes: object) -> CohortProblem:
    return CohortProblem(**{name: np.array(values) for name, values in {**GOOD, **changes}.items()})


def test_a_client_costs_its_samples_and_the_fixed_time() -> None:
    asked = problem()
    assert asked.client_s().tolist() == [[3.5, 6.0], [1.5, 2.0]]
    assert asked.load_s(np.array([0, 0])).tolist() == [5.0, 0.0]
    assert asked.load_s(np.array([0, 1])).tolist() == [3.5, 2.0]


def test_the_arrays_are_copies_that_cannot_be_changed() -> None:
    sizes = np.array([3.0, 1.0])
    asked = CohortProblem(sizes=sizes, seconds_per_sample=np.ones(1), fixed_s=np.zeros(1))
    sizes[0] = 7.0
    assert asked.sizes[0] == 3.0
    with pytest.raises(ValueError, match="read-only"):
        asked.sizes[0] = 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": []}, r"sizes: got an array of shape \(0,\)"),
        ({"sizes": [[1.0]]}, r"sizes: got an array of shape \(1, 1\), expected one dimension"),
        ({"sizes": [1.0, 0.0]}, "sizes: got 0.0, expected numbers above 0"),
        ({"sizes": [1.0, np.nan]}, "sizes: got nan, expected finite numbers"),
        ({"sizes": ["many"]}, "sizes: got ndarray, expected an array of numbers"),
        ({"seconds_per_sample": [1.0, np.inf]}, "seconds_per_sample: got inf"),
        ({"seconds_per_sample": [1.0, -2.0]}, "seconds_per_sample: got -2.0, expected no number below 0"),
        ({"fixed_s": [1.0]}, "fixed_s: got 1 numbers, expected 2, one per executor"),
        ({"fixed_s": [0.0, -1.0]}, "fixed_s: got -1.0"),
        ({"seconds_per_sample": [1.0, 0.0]}, "seconds_per_sample: got 0 for executor 1"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        problem(**changes)


def test_a_schedule_says_who_trains_whom_and_how_good_that_is() -> None:
    made = CohortSchedule(
        algorithm="by hand", executor_of=np.array([2, 0, 2]), load_s=np.array([1.0, 0.0, 3.0]), lower_bound_s=2.0
    )
    assert [clients.tolist() for clients in made.clients_of()] == [[1], [], [0, 2]]
    assert made.makespan_s == 3.0
    assert made.gap == 0.5
    assert parrot(problem()).gap is None


def test_algorithms_are_listed_described_and_found() -> None:
    assert sorted(COHORT_ALGORITHMS) == ["certified", "parrot", "uniform"]
    assert first_line(COHORT_ALGORITHMS["uniform"]).startswith("Equal numbers of clients per executor")
    assert all(schedule_cohort(name, problem()).algorithm == name for name in COHORT_ALGORITHMS)
    with pytest.raises(UserError, match="unknown cohort algorithm 'parott': did you mean 'parrot'"):
        schedule_cohort("parott", problem())
