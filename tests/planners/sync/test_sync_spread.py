"""Schedules that need not be intervals: what a move costs, and where the search must end."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_cases import line_of, problem_of, problems, profile

from isthmus.planners.sync import SyncProblem, plan_sync
from isthmus.planners.sync.dream import IterationCosts, greedy_places
from isthmus.planners.sync.timeline import iteration_s


@given(problems(most_workers=2), st.data())
def test_the_board_knows_what_every_move_costs(problem: SyncProblem, data: st.DataObject) -> None:
    line, iterations = line_of(problem), problem.iterations
    place = st.integers(0, iterations - 1)
    places = np.array(data.draw(st.lists(place, min_size=line.count, max_size=line.count)))
    board = IterationCosts(line, iterations, places)
    for h in range(iterations):
        here = set(np.flatnonzero(places == h).tolist())
        assert board.cost[h] == iteration_s(line, sorted(here))
        for layer in range(line.count):
            if layer in here:
                assert board.less[layer] == iteration_s(line, sorted(here - {layer}))
            else:
                assert board.more[h, layer] == iteration_s(line, sorted(here | {layer}))


@settings(max_examples=50)
@given(problems(most_layers=9, most_workers=2))
def test_every_move_helps_by_what_was_said_until_none_does(problem: SyncProblem) -> None:
    line = line_of(problem)
    board = IterationCosts(line, problem.iterations, np.zeros(line.count, dtype=np.intp))
    before = board.through_s()
    while board.move():
        sets = [np.flatnonzero(board.places == h).tolist() for h in range(problem.iterations)]
        assert sum(iteration_s(line, layers) for layers in sets) == board.through_s() < before
        before = board.through_s()
    for layer in range(line.count):
        for h in range(problem.iterations):
            places = board.places.copy()
            places[layer] = h
            assert IterationCosts(line, problem.iterations, places).through_s() >= before


@settings(max_examples=40, deadline=None)
@given(problems(most_layers=8, most_workers=2))
def test_spreading_is_never_worse_than_intervals(problem: SyncProblem) -> None:
    spread, exact = plan_sync("dream-spread", problem), plan_sync("dream", problem)
    assert spread.certificate.lower_bound <= spread.period_s <= exact.period_s
    assert spread == plan_sync("dream-spread", problem)


def test_spreading_starts_the_channel_early_in_every_iteration() -> None:
    """Two iterations of four equal layers: 0, 2 and 1, 3 leave 3 s exposed where the best intervals leave 4 s."""
    problem = problem_of(profile([0] * 4, [1] * 4, [2] * 4), iterations=2)
    plan = plan_sync("dream-spread", problem)
    assert plan.exposed_s == 3 and plan.certificate.gap == 0
    assert plan_sync("dream", problem).exposed_s == 4


def test_greedy_takes_the_emptiest_or_the_fullest_that_hides() -> None:
    line = line_of(problem_of(profile([0] * 3, [4, 4, 4], [0, 1, 1]), iterations=2))
    assert [greedy_places(line, 2, fullest=f).tolist() for f in (False, True)] == [[1, 0, 0], [0, 0, 0]]
