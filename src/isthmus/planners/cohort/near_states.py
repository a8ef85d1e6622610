"""Clients whose states lie on nodes: Parrot's greedy schedule, with what it takes to move a state from node to node."""

from __future__ import annotations

import numpy as np

from isthmus.planners.cohort.problem import CohortProblem, CohortSchedule, Floats, Integers

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
    staying = _greedy(problem, np.where(moves & ~stuck[:, None], np.inf, move_s * moves))
    moving = _greedy(problem, move_s * moves)
    return moving if staying.makespan_s > GAIN * moving.makespan_s else staying


def _greedy(problem: CohortProblem, extra_s: Floats) -> CohortSchedule:
    """`extra_s` (clients, executors) beside training."""
    executor_of = np.empty(problem.clients, dtype=np.int64)
    load_s = np.zeros(problem.executors)
    for client in np.argsort(-problem.sizes, kind="stable"):
        finished_s = load_s + problem.fixed_s + problem.seconds_per_sample * problem.sizes[client] + extra_s[client]
        executor = int(finished_s.argmin())
        executor_of[client] = executor
        load_s[executor] = finished_s[executor]
    return CohortSchedule(algorithm="near_states", executor_of=executor_of, load_s=load_s)
