"""Pipelines whose stages may recompute: every choice of stages where all are tried, likely ones where a search goes on.

A stage gains from it only where its memory holds fewer than all micro-batches, and a pipeline only where that throttles
it, or, under gpipe, where it does not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from isthmus.cost import Problem
from isthmus.cost.cut_table import Ints
from isthmus.cost.network import FleetNetwork
from isthmus.cost.pipelines import Bools, Pipelines, Trials, joined, timed


def every_choice(problem: Problem, network: FleetNetwork, trials: Trials, known_s: float) -> Pipelines:
    """Those that fit and whose fill is below `known_s`, each with every set of its stages that may gain."""
    plain = timed(problem, network, trials)
    rows = np.flatnonzero(plain.fill_s < known_s)  # a stage that recomputes only adds to it
    plain, trials = plain[rows], trials[rows]
    pipelines = joined([plain, *_others(problem, network, trials, plain)])
    pipelines = pipelines[pipelines.fitting()]
    return pipelines[np.flatnonzero(pipelines.fill_s < known_s)]


def likely_choice(problem: Problem, network: FleetNetwork, trials: Trials, micro_batches: int) -> Pipelines:
    """One choice per trial: none, the stages that throttle it, or all that are short of memory; the soonest with so
    many micro-batches."""
    plain = timed(problem, network, trials)
    if not problem.recompute:
        return plain
    short = plain.held < problem.micro_batches
    rows = np.flatnonzero(_hindered(problem, plain))
    best, best_s = plain, plain.step_s(micro_batches)
    for chosen in (_throttling(plain), short):
        if len(rows):
            other = timed(problem, network, trials[rows], chosen[rows])
            other_s = other.step_s(micro_batches)
            better = np.flatnonzero(other_s < best_s[rows])
            best = best.put(rows[better], other[better])
            best_s[rows[better]] = other_s[better]
    return best


def _others(problem: Problem, network: FleetNetwork, trials: Trials, plain: Pipelines) -> Iterator[Pipelines]:
    if not problem.recompute:
        return
    short, hindered = plain.held < problem.micro_batches, _hindered(problem, plain)
    stages = range(short.shape[1])
    for size in range(1, len(stages) + 1):
        for chosen in itertools.combinations(stages, size):
            rows: Ints = np.flatnonzero(hindered & short[:, chosen].all(axis=1))
            if len(rows):
                recompute = np.zeros((len(rows), len(stages)), dtype=bool)
                recompute[:, chosen] = True
                yield timed(problem, network, trials[rows], recompute)


def _hindered(problem: Problem, plain: Pipelines) -> Bools:
    """[pipelines]: whether memory throttles them, or does not hold what gpipe asks."""
    if problem.schedule == "gpipe":
        return np.less(plain.most, problem.micro_batches)
    return np.asarray(_throttling(plain).any(axis=1))


def _throttling(plain: Pipelines) -> Bools:
    """[pipelines, stages]: stages whose round trip over what they hold is longer than anything is busy."""
    return np.greater(plain.round_trip_s, plain.busy_s[:, None] * np.maximum(plain.held, 1))
