"""FedML Parrot's task scheduling (Algorithm 3 after its first R_w rounds): the largest client first, greedily."""

from __future__ import annotations

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, Integers, scheduled


def parrot(problem: CohortProblem) -> CohortSchedule:
    """Clients by descending size, each to the executor that then leaves the smallest maximum load (Eq. 4).

    That maximum ties often: while the busiest executor stays the busiest, every other one gives the same. Ties go to
    the smaller `w_k + N_m t_k + b_k`, then to the executor with the smaller number; equal sizes in the cohort's order.
    """
    return scheduled(problem, longest_first(problem), algorithm="parrot")


def longest_first(problem: CohortProblem) -> Integers:
    """(clients,) the executor that Algorithm 3 gives each client; O(clients x executors).

    Eq. 4 with its ties broken is plainly the executor that would finish first: the executor with the smallest maximum
    has either the smallest finishing time, or ties with the executor that has it.
    """
    executor_of = np.empty(problem.clients, dtype=np.int64)
    load_s = np.zeros(problem.executors)
    finished_s = np.empty(problem.executors)
    for client in np.argsort(-problem.sizes, kind="stable"):
        np.multiply(problem.seconds_per_sample, problem.sizes[client], out=finished_s)
        finished_s += problem.fixed_s
        finished_s += load_s
        executor = int(finished_s.argmin())
        executor_of[client] = executor
        load_s[executor] = finished_s[executor]
    return executor_of
