"""What a plan leaves free of each device's memory: a fleet with that much less memory has the same plans."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from plan_cases import document, fleet_of, problem_of, random_graph
from test_verify import check, make_plan, question_of

from isthmus.cost import Problem
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners import plan, planner_names
from isthmus.plans import Constraints, Plan
from isthmus.verification import verify

OURS = [name for name in planner_names() if not name.startswith("test")]
SPEEDS = [1.0, 2.0, 4.0]


def used(made: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage in (stage for replica in made.replicas for stage in replica.stages):
        found[stage.device] = found.get(stage.device, 0) + stage.memory.total
    return found


def tight(headroom: float) -> Problem:
    """Without headroom the fastest pipeline fills a device to the byte."""
    graph = random_graph(3, 6)
    most = max(used(plan("chain", problem_of(graph, fleet_of(SPEEDS, 3)))).values())
    return problem_of(
        graph, fleet_of(SPEEDS, 3, memory=[most] * len(SPEEDS)), constraints=Constraints(memory_headroom=headroom)
    )


@pytest.mark.parametrize("name", OURS)
def test_plans_are_those_of_a_fleet_with_less_memory(name: str) -> None:
    headroom = 0.2
    problem = tight(headroom)
    devices = tuple(
        msgspec.structs.replace(d, memory_bytes=problem.offered_bytes(d.name)) for d in problem.fleet.devices
    )
    less = replace(problem, fleet=msgspec.structs.replace(problem.fleet, devices=devices), constraints=Constraints())
    try:
        expected = plan(name, less)
    except FleetTooSmall:
        with pytest.raises(FleetTooSmall, match=rf"offers \d+ B after {100 * headroom:.0f} % headroom"):
            plan(name, problem)
        return
    made = plan(name, problem)
    assert made.replicas == expected.replicas and made.predicted == expected.predicted
    for device, size in used(made).items():
        assert size <= (1 - headroom) * problem.fleet.device(device).memory_bytes
    whole = document(problem, made)
    assert whole.certificate is not None
    assert f"{100 * headroom:.0f} % of each device's memory left free" in whole.certificate.question
    found = verify(whole, question_of(problem))
    assert found.holds(), (found.bound, found.differences)


def test_without_headroom_a_plan_may_fill_a_device_to_the_byte() -> None:
    graph = random_graph(3, 6)
    roomy = problem_of(graph, fleet_of([1.0]), recompute=False, schedule="gpipe")
    size = plan("chain", roomy).stages[0].memory.total
    full = replace(roomy, fleet=fleet_of([1.0], memory=[size]))
    check(plan("chain", full), full)
    with pytest.raises(FleetTooSmall, match=r"device d0 .*, offers .* after 10 % headroom: [\d.]+ \w+ short"):
        plan("chain", replace(full, constraints=Constraints(memory_headroom=0.1)))


@pytest.mark.parametrize("claimed", [0.0, 0.1])
def test_a_plan_made_without_headroom_is_none_for_who_asked_for_it(claimed: float) -> None:
    asked = tight(0.1)
    made = make_plan("chain", replace(asked, constraints=Constraints()))
    name, size = max(used(made).items(), key=lambda item: item[1])
    assert size == asked.fleet.device(name).memory_bytes
    forged = msgspec.structs.replace(made, constraints=Constraints(memory_headroom=claimed))
    fields = {d.field: d for d in verify(forged, question_of(asked)).differences}
    assert ("constraints.memory_headroom" in fields) == (not claimed)
    (short,) = [d for field, d in fields.items() if field.endswith(".memory") and name in str(d.expected)]
    assert f"at most {asked.offered_bytes(name)} on" in str(short.expected)
    without = question_of(replace(asked, constraints=Constraints()))  # and the other way round
    assert any(d.field == "constraints.memory_headroom" for d in verify(make_plan("chain", asked), without).differences)


@pytest.mark.parametrize("headroom", [1.0, -0.1, float("nan"), float("inf")])
def test_a_headroom_that_is_no_share_is_refused(headroom: float) -> None:
    with pytest.raises(UserError, match=r"memory_headroom: got .*, expected at least 0 and less than 1"):
        Constraints(memory_headroom=headroom)
