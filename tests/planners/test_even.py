"""The baseline: equal numbers of operators."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plan_cases import fleet_of, problem_of, random_graph

from isthmus.graph import cuts
from isthmus.planners import plan
from isthmus.planners.baselines.even import even_boundaries


@given(st.sets(st.integers(1, 99)), st.integers(1, 12))
def test_boundaries_are_legal_places_in_order(places: set[int], stages: int) -> None:
    chosen = even_boundaries(sorted(places), 100, stages)
    assert len(chosen) == min(stages - 1, len(places))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= places


def test_with_a_place_everywhere_stages_are_equal() -> None:
    assert even_boundaries(range(1, 12), 12, 4) == [3, 6, 9]


def test_a_cut_moves_to_the_nearest_place() -> None:
    assert even_boundaries([1, 2, 8, 11], 12, 3) == [2, 8]
    assert even_boundaries([1, 2], 12, 3) == [1, 2]


def test_devices_are_used_in_fleet_order_as_far_as_the_model_can_be_cut() -> None:
    problem = problem_of(random_graph(3, 2), fleet_of([1.0] * 6))
    made = plan("even", problem)
    places = {c.position for c in cuts(problem.flow)}
    assert [s.device for s in made.stages] == list(problem.fleet.names[: len(places) + 1])
    assert set(made.boundaries()) <= places
    assert made.notes[-1] == "d5 is left out: the model has no further place to cut"
    assert made.certificate is None
