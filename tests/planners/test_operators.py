"""Plans on fleets where not every device has every operator."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from plan_cases import all_orders_of, fleet_of, problem_of, random_graph

from isthmus.cost import Problem, broken_constraint, build_plan, build_replicas, layouts_of
from isthmus.errors import UserError
from isthmus.graph import cuts
from isthmus.planners import plan
from isthmus.plans import Constraints, LackingOperators, Plan
from isthmus.verification import Question, verify

ODD = "aten.odd.default"


def problem(*lacking: tuple[str, str], odd: tuple[int, ...] = (3,), devices: int = 3, seed: int = 1) -> Problem:
    """A chain in which the operators at these positions are odd."""
    graph = random_graph(seed, 7)
    targets = {f"op{k}": f"{ODD[:-8]}{n or ''}.default" for n, k in enumerate(odd)}
    ops = tuple(msgspec.structs.replace(op, target=targets.get(op.name, op.target)) for op in graph.ops)
    fleet = fleet_of([1.0, 4.0, 2.0, 3.0][:devices], seed)
    made = tuple(LackingOperators(device=device, operators=(target,)) for device, target in lacking)
    constraints = Constraints(lacking=made)
    return problem_of(msgspec.structs.replace(graph, ops=ops), fleet, constraints=constraints)


def keeps_to(problem: Problem, made: Plan) -> bool:
    return all(
        broken_constraint(problem, [s.device for s in r.stages], [s.first for s in r.stages[1:]]) is None
        for r in made.replicas
    )


@pytest.mark.parametrize("name", ["even", "random", "op-fence", "sky-heuristic"])
def test_planners_keep_operators_where_they_are_known(name: str) -> None:
    free = plan(name, problem())
    device = next(
        stage.device for replica in free.replicas for stage in replica.stages if stage.first <= 3 <= stage.last
    )
    asked = problem((device, ODD))
    assert not keeps_to(asked, free)
    assert keeps_to(asked, plan(name, asked))


@pytest.mark.parametrize("seed", range(1, 5))
def test_our_searches_find_the_best_pipeline(seed: int) -> None:
    asked = problem(("d1", ODD), seed=seed)
    places = [cut.position for cut in cuts(asked.flow)]
    layouts = [
        (order, boundaries)
        for order in all_orders_of(asked.fleet)
        for boundaries in itertools.combinations(places, len(order) - 1)
    ]
    kept = [layout for layout in layouts if broken_constraint(asked, *layout) is None]
    least_s = min(build_plan(asked, *layout, planner="all").predicted.step_s for layout in kept)
    assert plan("chain", asked).predicted.step_s == pytest.approx(least_s)
    assert plan("auto", asked).predicted.step_s <= least_s * (1 + 1e-9)


def test_no_device_has_all_of_them() -> None:
    """Each device gets stages of what it has."""
    asked = problem(("d0", "aten.odd.default"), ("d1", "aten.odd1.default"), odd=(2, 5), devices=2)
    for name in ("chain", "auto", "even"):
        made = plan(name, asked)
        assert keeps_to(asked, made) and len(made.used) == 2


def test_no_device_has_it() -> None:
    asked = problem(*((f"d{k}", ODD) for k in range(3)))
    with pytest.raises(UserError, match=r"no device of fleet 'hand' has aten\.odd\.default"):
        plan("auto", asked)


def test_one_that_masks_need_is_needed_anywhere() -> None:
    asked = problem(("d1", "aten.arange.default"))
    made = plan("auto", asked)
    assert "d1" not in made.used and "d1 is left out: it lacks aten.arange.default" in made.notes


def test_a_document_that_breaks_it() -> None:
    """It is not built, and found by who checks it."""
    asked = problem(("d1", ODD))
    free = plan("chain", asked.everywhere())
    layouts = layouts_of(free)
    with pytest.raises(UserError, match=r"device d1 lacks aten\.odd\.default, which its stage computes"):
        build_replicas(asked, layouts, planner="chain")
    question = Question(
        graph=asked.flow.graph,
        fleet=asked.fleet,
        micro_batch_size=asked.micro_batch_size,
        micro_batches=asked.micro_batches,
        schedule=asked.schedule,
        constraints=asked.constraints,
    )
    stated = msgspec.structs.replace(free, constraints=asked.constraints)
    assert [d.field for d in verify(stated, question).differences] == ["replicas[0]: device 'd1'"]
    assert verify(plan("chain", asked), question).holds()
