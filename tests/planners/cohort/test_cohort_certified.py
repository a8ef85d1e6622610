"""`certified` and its parts, against brute force and a linear programme written out."""

from __future__ import annotations

import numpy as np
import pytest
from cohort_cases import KINDS, cohorts, random_cohort, shortest_s
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from isthmus.planners.cohort import CohortProblem, certified, parrot
from isthmus.planners.cohort.certified import (
    counting_bound_s,
    dual_bound_s,
    exchange,
    first_fit,
    fractional,
    smallest_fit,
)

SLACK = 1 + 1e-9


def fractional_by_linprog_s(problem: CohortProblem) -> float:
    """The programme with one variable per client and executor, and T."""
    clients, executors = problem.clients, problem.executors
    seconds = problem.client_s()
    cost = np.zeros(clients * executors + 1)
    cost[-1] = 1.0
    loads = np.zeros((executors, len(cost)))
    whole = np.zeros((clients, len(cost)))
    for m in range(clients):
        for k in range(executors):
            loads[k, m * executors + k] = seconds[m, k]
            whole[m, m * executors + k] = 1.0
    loads[:, -1] = -1.0
    solved = linprog(cost, A_ub=loads, b_ub=np.zeros(executors), A_eq=whole, b_eq=np.ones(clients))
    return float(solved.fun)


def ascending(problem: CohortProblem) -> CohortProblem:
    return CohortProblem(
        sizes=np.sort(problem.sizes), seconds_per_sample=problem.seconds_per_sample, fixed_s=problem.fixed_s
    )


@settings(deadline=None)
@given(cohorts(most_clients=6, most_executors=3))
def test_no_schedule_is_shorter_than_the_bound_and_certified_is_a_schedule(problem: CohortProblem) -> None:
    made, best_s = certified(problem, steps=50), shortest_s(problem)
    assert made.lower_bound_s is not None
    assert made.lower_bound_s <= best_s * SLACK
    assert best_s <= made.makespan_s * SLACK
    assert made.load_s == pytest.approx(problem.load_s(made.executor_of))
    assert made.makespan_s <= parrot(problem).makespan_s * SLACK


@settings(deadline=None)
@given(cohorts(most_clients=7, most_executors=3))
def test_the_counting_bound_is_one(problem: CohortProblem) -> None:
    ordered = ascending(problem)
    assert counting_bound_s(ordered, low_s=0.0, high_s=parrot(ordered).makespan_s) <= shortest_s(problem) * SLACK


def test_numbers_next_to_each_other_end_the_search() -> None:
    tiny = CohortProblem(sizes=np.array([1e-300, 3e-300]), seconds_per_sample=np.full(1, 1e-20), fixed_s=np.zeros(1))
    assert counting_bound_s(tiny, low_s=0.0, high_s=5e-324) == 0.0


def test_counting_sees_that_two_clients_meet() -> None:
    # Three clients on two equal executors: shares of 1.5 clients are worth nothing.
    problem = CohortProblem(sizes=np.array([5.0, 5.0, 5.0]), seconds_per_sample=np.ones(2), fixed_s=np.ones(2))
    assert fractional(problem).lower_bound_s == pytest.approx(9.0)
    assert counting_bound_s(problem, low_s=9.0, high_s=18.0) == pytest.approx(12.0, rel=1e-5)
    assert certified(problem).gap == pytest.approx(0.0, abs=1e-5)


@settings(deadline=None)
@given(cohorts(most_clients=8, most_executors=5))
def test_the_fractional_optimum_equals_the_linear_programmes(problem: CohortProblem) -> None:
    solved = fractional(problem)
    # HiGHS takes less than 1e-7 for nothing.
    assert solved.lower_bound_s == pytest.approx(fractional_by_linprog_s(problem), rel=1e-6, abs=1e-7)
    assert sorted(solved.specialists) == list(range(problem.executors))


@given(cohorts(most_clients=8, most_executors=4), st.data())
def test_any_prices_give_a_bound(problem: CohortProblem, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=problem.executors, max_size=problem.executors))
    prices = np.array(weights) / sum(weights)
    assert dual_bound_s(problem, prices) <= parrot(problem).makespan_s * SLACK


@given(cohorts(most_clients=20, most_executors=5), st.floats(0.1, 3.0))
def test_first_fit_takes_the_largest_that_fits(problem: CohortProblem, share: float) -> None:
    ordered = ascending(problem)
    limit_s = share * parrot(ordered).makespan_s
    left, literal = list(range(ordered.clients)), [-1] * ordered.clients
    for k in range(ordered.executors):
        free_s = limit_s * (1 + 1e-12)
        for m in reversed(range(ordered.clients)):
            needed_s = ordered.sizes[m] * ordered.seconds_per_sample[k] + ordered.fixed_s[k]
            if m in left and needed_s <= free_s:
                left.remove(m)
                literal[m] = k
                free_s -= needed_s
    found = first_fit(ordered, range(ordered.executors), limit_s)
    if found is None:
        assert left
    else:
        assert not left
        assert ordered.load_s(found).max() <= limit_s * SLACK
        assert ordered.load_s(found) == pytest.approx(ordered.load_s(np.array(literal)))


def test_the_smallest_fit_is_between_its_limits_or_nothing() -> None:
    problem = ascending(random_cohort("uniform", 60, 4, seed=1))
    order = fractional(problem).specialists[::-1]
    high_s = parrot(problem).makespan_s
    found = smallest_fit(problem, order, low_s=high_s / 2, high_s=high_s)
    assert found is not None
    assert problem.load_s(found).max() <= high_s * SLACK
    assert smallest_fit(problem, order, low_s=1.0, high_s=2.0) is None


@settings(deadline=None)
@given(cohorts(most_clients=15, most_executors=5), st.integers(0, 30))
def test_exchanges_keep_every_client_and_never_return_worse(problem: CohortProblem, steps: int) -> None:
    ordered = ascending(problem)
    start = np.zeros(ordered.clients, dtype=np.int64)
    found = exchange(ordered, start, stop_s=0.0, steps=steps)
    assert ((found >= 0) & (found < ordered.executors)).all()
    assert ordered.load_s(found).max() <= ordered.load_s(start).max() * SLACK
    assert not start.any()


@settings(deadline=None)
@given(cohorts(most_clients=7, most_executors=4), st.integers(0, 1000))
def test_an_exchange_is_the_one_whose_executors_end_soonest(problem: CohortProblem, seed: int) -> None:
    ordered = ascending(problem)
    start = np.random.default_rng(seed).integers(0, ordered.executors, ordered.clients)
    before_s = float(ordered.load_s(start).max())
    source = int(ordered.load_s(start).argmax())
    after: list[tuple[float, float]] = []
    """(the later end of the two executors, the makespan)."""
    for m in np.flatnonzero(start == source):
        for k in set(range(ordered.executors)) - {source}:
            for other in [None, *np.flatnonzero(start == k)]:
                changed = start.copy()
                changed[m] = k
                if other is not None:
                    changed[other] = source
                load_s = ordered.load_s(changed)
                if other is None or ordered.sizes[other] != ordered.sizes[m]:
                    after.append((float(load_s[[source, k]].max()), float(load_s.max())))
    soonest_s = min((end_s for end_s, _ in after), default=before_s)
    makespans_s = [min(total_s, before_s) for end_s, total_s in after if end_s <= soonest_s * SLACK] or [before_s]
    found_s = float(ordered.load_s(exchange(ordered, start, stop_s=0.0, steps=1)).max())
    assert any(found_s == pytest.approx(makespan_s) for makespan_s in makespans_s)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gap_is_small_where_executors_get_many_clients(kind: str) -> None:
    made = certified(random_cohort(kind, 1000, 32, seed=7))
    assert made.gap is not None
    assert 0 <= made.gap <= 0.002


def test_the_same_problem_gives_the_same_schedule() -> None:
    first, second = (certified(random_cohort("lognormal", 200, 16, seed=3)) for _ in range(2))
    assert first.executor_of.tolist() == second.executor_of.tolist()


def test_more_executors_than_clients() -> None:
    problem = random_cohort("uniform", 5, 40, seed=2)
    made = certified(problem)
    assert (made.load_s == 0).sum() >= 35
    assert made.gap == pytest.approx(0.0, abs=1e-5)


def test_prices_of_executors_that_differ_beyond_all_measure_do_not_overflow() -> None:
    problem = CohortProblem(
        sizes=np.array([1.0, 2.0, 3.0]), seconds_per_sample=np.array([1.0, 1e-311]), fixed_s=np.zeros(2)
    )
    made = certified(problem)
    assert made.executor_of.tolist() == [1, 1, 1]
    assert made.lower_bound_s is not None
    assert 0 <= made.lower_bound_s <= made.makespan_s
