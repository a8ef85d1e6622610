"""What several replicas become when one of them has lost a device: the others, with its micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plan_cases import fleet_of, problem_of, random_graph, saving

from isthmus.cost import PlanLayout, build_replicas, layouts_of
from isthmus.graph import cuts
from isthmus.planners import whole_replicas
from isthmus.planners.whole_replicas import dealt


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_all_are_dealt_in_proportion(shares: list[int], more: int) -> None:
    total = sum(shares) + more
    found = dealt(total, shares)
    assert sum(found) == total
    assert all(abs(got - total * share / sum(shares)) < 1 for got, share in zip(found, shares, strict=True))
    assert all(got >= share for got, share in zip(found, shares, strict=True))


def test_the_replicas_that_lost_nobody_keep_their_cuts_and_share_the_batch() -> None:
    problem = problem_of(random_graph(3, 12), fleet_of([5.0] * 5), micro_batches=8)
    cut = cuts(problem.flow)[2].position
    layouts = [PlanLayout(("d0", "d1"), (cut,), 4), PlanLayout(("d2",), (), 2), PlanLayout(("d3", "d4"), (cut,), 2)]
    plan = build_replicas(problem, layouts, planner="test")
    found = whole_replicas(problem, plan, ("d0", "d2", "d3", "d4"))
    assert found is not None
    assert [(x.order, x.boundaries, x.micro_batches) for x in layouts_of(found)] == [
        (("d2",), (), 4),
        (("d3", "d4"), (cut,), 4),
    ]
    alone = whole_replicas(problem, plan, ("d0", "d2"))
    assert alone is not None and alone.used == ("d2",) and not alone.sync.groups and alone.micro_batches == 8
    assert whole_replicas(problem, plan, ("d0", "d3")) is None


def test_a_replica_without_room_for_more_does_not_go_on() -> None:
    """GPipe keeps what all its micro-batches save."""
    graph, layouts = saving(random_graph(3, 12), 100), [PlanLayout(("d0",), (), 4), PlanLayout(("d1",), (), 4)]
    roomy = problem_of(graph, fleet_of([5.0, 5.0]), micro_batches=8, schedule="gpipe", recompute=False)
    total = build_replicas(roomy, layouts, planner="test").replicas[0].stages[0].memory.total
    fleet = fleet_of([5.0, 5.0], memory=[total, total])
    tight = problem_of(graph, fleet, micro_batches=8, schedule="gpipe", recompute=False)
    plan = build_replicas(tight, layouts, planner="test")
    assert whole_replicas(roomy, plan, ("d1",)) is not None
    assert whole_replicas(tight, plan, ("d1",)) is None
