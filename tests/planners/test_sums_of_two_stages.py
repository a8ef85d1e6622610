"""Replicas of which one has two stages on a data holder: each of its stages sums the parameters that it owns."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import problem_of, random_graph
from term_cases import priced_fleet

from isthmus.api.proof import question_of
from isthmus.cost import PlanLayout, build_replicas, place
from isthmus.errors import UserError
from isthmus.graph import cuts
from isthmus.plans import Constraints
from isthmus.verification import verify


def test_each_stage_of_a_device_sums_what_it_owns() -> None:
    constraints = Constraints(data_holders=("d0", "d1"), labels_stay=True)
    problem = problem_of(random_graph(2, 8), priced_fleet(2, 3), micro_batches=4, constraints=constraints)
    places = [cut.position for cut in cuts(problem.flow)]
    names, ends = problem.fleet.names, (places[0], places[-1])
    layouts = [PlanLayout((names[0], names[2], names[0]), ends, 2), PlanLayout((names[1],), (), 2)]
    plan = build_replicas(problem, layouts, planner="test")
    graphs = [graph for layout in layouts for graph in place(problem, layout.order, layout.boundaries).graphs]
    summed: list[str] = []
    for group in plan.sync.groups:
        for worker in plan.members(group):
            assert set(group.parameters) <= {op.name for op in graphs[worker].variables()} - set(
                graphs[worker].shared_from
            )
        summed += group.parameters
    assert len(summed) == len(set(summed)) and len({group.stages for group in plan.sync.groups}) > 1
    question = question_of(problem, (problem.micro_batches,))
    assert not verify(plan, question).differences
    first, *rest = plan.sync.groups
    strange = msgspec.structs.replace(first, stages=(7, 0))
    forged = msgspec.structs.replace(plan, sync=msgspec.structs.replace(plan.sync, groups=(strange, *rest)))
    assert verify(forged, question).differences
    with pytest.raises(UserError, match="expected one that has a stage"):
        forged.members(strange)
