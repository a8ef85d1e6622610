"""`uniform` and `parrot` against Algorithm 3 of the Parrot paper, written out as it is printed."""

from __future__ import annotations

import numpy as np
from cohort_cases import cohorts, random_cohort
from hypothesis import given

from isthmus.planners.cohort import CohortProblem, parrot, uniform


def algorithm_3(problem: CohortProblem) -> list[list[int]]:
    """Its lines after the first R_w rounds. Eq. 4 is printed without the condition k' = k on the added time.

    Taken literally it would add every executor's own time for the client to every load, and choose nothing. What is
    meant is the maximum load once the client is with k.
    """
    t, b = problem.seconds_per_sample.tolist(), problem.fixed_s.tolist()
    sizes, executors = problem.sizes.tolist(), range(problem.executors)
    sets: list[list[int]] = [[] for _ in executors]
    w = [0.0 for _ in executors]
    for m in sorted(range(problem.clients), key=lambda m: sizes[m], reverse=True):
        best: tuple[float, float] | None = None
        best_k = -1
        for k in executors:
            after = [w[j] + (sizes[m] * t[k] + b[k] if j == k else 0.0) for j in executors]
            if best is None or (max(after), after[k]) < best:
                best, best_k = (max(after), after[k]), k
        sets[best_k].append(m)
        w[best_k] = w[best_k] + (sizes[m] * t[best_k] + b[best_k])
    return sets


@given(cohorts(most_clients=30, most_executors=8))
def test_parrot_is_algorithm_3(problem: CohortProblem) -> None:
    made = [clients.tolist() for clients in parrot(problem).clients_of()]
    assert made == [sorted(clients) for clients in algorithm_3(problem)]


def test_parrot_is_algorithm_3_on_a_round_of_the_papers_size() -> None:
    problem = random_cohort("lognormal", 300, 16, seed=1)
    made = [clients.tolist() for clients in parrot(problem).clients_of()]
    assert made == [sorted(clients) for clients in algorithm_3(problem)]


def test_ties_go_to_the_executor_that_ends_first() -> None:
    # The first client makes executor 0 busy for 10 s; after that every executor gives the same maximum.
    problem = CohortProblem(
        sizes=np.array([10.0, 1.0, 1.0]), seconds_per_sample=np.array([1.0, 3.0, 2.0]), fixed_s=np.zeros(3)
    )
    assert parrot(problem).executor_of.tolist() == [0, 2, 1]


@given(cohorts(most_clients=30, most_executors=8))
def test_uniform_gives_equal_numbers(problem: CohortProblem) -> None:
    made = uniform(problem)
    counts = [len(clients) for clients in made.clients_of()]
    assert sum(counts) == problem.clients
    assert max(counts) - min(counts) <= 1
    assert made.load_s.tolist() == problem.load_s(made.executor_of).tolist()
