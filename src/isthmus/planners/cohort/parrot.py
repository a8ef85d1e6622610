"""FedML Parrot's task scheduling (Algorithm 3): equal numbers of clients in its first R_w rounds, before any time was
recorded; then the largest client first, greedily. Ours counts what it takes to move a state from node to node, too.
"""

from __future__ import annotations

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, Floats, Integers, scheduled


def parrot(problem: CohortProblem) -> CohortSchedule:
    """Clients by descending size, each to the executor that then leaves the smallest maximum load (Eq. 4).

    That maximum ties often: while the busiest executor stays the busiest, every other one gives the same. Ties go to
    the smaller `w_k + N_m t_k + b_k`, then to the executor with the smaller number; equal sizes in the cohort's order.
    """
    return scheduled(problem, longest_first(problem), algorithm="parrot")


def longest_first(problem: CohortProblem, extra_s: Floats | None = None) -> Integers:
    """(clients,) the executor that Algorithm 3 gives each client; O(clients x executors). `extra_s` (clients,
    executors) are seconds beside training.

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
        if extra_s is not None:
            finished_s += extra_s[client]
        executor = int(finished_s.argmin())
        executor_of[client] = executor
        load_s[executor] = finished_s[executor]
    return executor_of


def uniform(problem: CohortProblem) -> CohortSchedule:
    """Equal numbers of clients per executor, to within one, in turn; sizes and times are not looked at."""
    executor_of = np.arange(problem.clients, dtype=np.int64) % problem.executors
    return scheduled(problem, executor_of, algorithm="uniform")


GAIN = 1.05
"""States move where the round is so many times as long without it: predictions change from round to round, and states
that follow them would move back and forth."""


def near_states(problem: CohortProblem, homes: Integers, nodes: Integers, move_s: float) -> CohortSchedule:
    """`homes` (clients,) are the nodes of the clients' states, below 0 for none; `nodes` (executors,) those of the
    executors; a state takes `move_s` to another node.

    Clients by descending size, each to the executor that finishes it first. A state whose node has no executor left
    moves in any case.
    """
    moves = (homes >= 0)[:, None] & (homes[:, None] != nodes[None, :])
    stuck = moves.all(axis=1)
    staying = _with_moves(problem, np.where(moves & ~stuck[:, None], np.inf, move_s * moves))
    moving = _with_moves(problem, move_s * moves)
    return moving if staying.makespan_s > GAIN * moving.makespan_s else staying


def _with_moves(problem: CohortProblem, moves_s: Floats) -> CohortSchedule:
    executor_of = longest_first(problem, moves_s)
    moved_s = np.bincount(executor_of, moves_s[np.arange(problem.clients), executor_of], problem.executors)
    load_s = problem.load_s(executor_of) + moved_s
    return CohortSchedule(algorithm="near_states", executor_of=executor_of, load_s=load_s)
