"""`verify` passes what the planners make, agrees with brute force, and sees every figure that is not what it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import document, fleet_of, gpt_graph, problem_of, random_graph, saving
from tests.tiers import represented_by

from isthmus.api.make_plan import question_of as asked_of
from isthmus.cost import PlanLayout, Problem, build_plan, build_replicas, parameter_state, plan_compression
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Region, Route, corrected
from isthmus.planners import plan as plan_by
from isthmus.plans import Collective, Constraints, Plan
from isthmus.verification import Question, Verdict, state_bytes, verify


def question_of(problem: Problem) -> Question:
    return asked_of(problem, (problem.micro_batches,))


def make_plan(planner: str, problem: Problem) -> Plan:
    """As documents have it, simulated and with a bound."""
    return document(problem, plan_by(planner, problem))


def two_sites(uplink: float, seed: int) -> Fleet:
    devices = tuple(
        Device(name=f"d{i}", region="east" if i < 2 else "west", flops_per_s=1.0 + (seed + i) % 3, memory_bytes=1 << 30)
        for i in range(4)
    )
    links = Links(
        intra=Link(0.01, 500.0), default=Link(0.5, 60.0), devices=(Route("d0", "d2", Link(0.1, 20.0 + seed % 9)),)
    )
    return Fleet(
        name="two", devices=devices, links=links, region_info=(Region(region="east", uplink_bytes_per_s=uplink),)
    )


def check(plan: Plan, problem: Problem, *, proven: bool = True) -> Verdict:
    """Of the document that a command would make of the plan; without a bound where that is not what is checked."""
    found = verify(document(problem, plan) if proven else plan, question_of(problem))
    assert found.holds(), (found.bound, found.differences)
    return found


@given(
    planner=st.sampled_from(["even", "chain", "auto"]),
    seed=st.integers(0, 10**6),
    devices=st.integers(1, 4),
    units=st.integers(2, 6),
    micro_batches=st.integers(1, 6),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
    memory=st.sampled_from([1 << 40, 6000, 2500]),
    saved=st.sampled_from([1, 30]),
    recompute=st.booleans(),
)
@example(
    planner="auto",
    seed=209033,
    devices=4,
    units=4,
    micro_batches=3,
    schedule="1f1b",
    memory=1 << 40,
    saved=1,
    recompute=False,
)  # three replicas
@settings(max_examples=60, deadline=None)
def test_every_plan_of_ours_passes(
    planner: str,
    seed: int,
    devices: int,
    units: int,
    micro_batches: int,
    schedule: str,
    memory: int,
    saved: int,
    recompute: bool,
) -> None:
    stated = fleet_of([1 + (seed * (k + 3)) % 7 for k in range(devices)], seed, memory=[memory] * devices)
    fleet = corrected(stated, {"d0": 0.5 * stated.device("d0").flops_per_s}, {})
    state = parameter_state("adamw")
    problem = problem_of(
        saving(random_graph(seed, units), saved),
        fleet,
        micro_batches=micro_batches,
        schedule=schedule,
        state=state,
        recompute=recompute,
    )
    try:
        plan = plan_by(planner, problem)
    except FleetTooSmall:
        return
    found = check(plan, problem)
    assert found.checked > 20
    assert recompute or not any(stage.recompute for replica in plan.replicas for stage in replica.stages)
    assert found.bound.status == ("none stated" if schedule == "zero-bubble" else "proven")
    assert plan.replicas[0].schedule.name == schedule


@given(
    seed=st.integers(0, 10**6),
    uplink=st.floats(1, 100),
    cuts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    share=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("proven", represented_by([False, True], False))  # test_every_field_... has one with a bound
def test_replicas_and_shared_uplinks_pass(
    proven: bool, seed: int, uplink: float, cuts: tuple[int, int], share: int
) -> None:
    problem = problem_of(random_graph(seed, 5), two_sites(uplink, seed), micro_batches=6)
    layouts = [PlanLayout(("d2", "d0"), (cuts[0],), share), PlanLayout(("d1", "d3"), (cuts[1],), 6 - share)]
    check(build_replicas(problem, layouts, planner="hand"), problem, proven=proven)
    check(build_plan(problem, ["d0", "d3", "d1"], [2, 4], planner="hand"), problem, proven=proven)


WORDS = {"planner", "notes", "version"}
"""What `verify` does not judge; `load_plan` refuses another version."""

Built = dict[str, "Built"] | list["Built"] | str | int | float | None


def leaves(built: Built, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(built, dict):
        for key, value in built.items():
            yield from leaves(value, (*path, key))
    elif isinstance(built, list):
        for index, value in enumerate(built):
            yield from leaves(value, (*path, index))
    elif built is not None:
        yield path


def changed(built: Built, path: tuple[str | int, ...], other: Built) -> Built:
    if not path:
        return other
    assert isinstance(built, dict | list)
    made = built.copy()
    made[path[0]] = changed(built[path[0]], path[1:], other)  # type: ignore[index,call-overload]
    return made


def at(built: Built, path: tuple[str | int, ...]) -> Built:
    for step in path:
        built = built[step]  # type: ignore[index,call-overload]
    return built


def two_replicas() -> tuple[Plan, Problem]:
    """Edges, a skip, a shared parameter, groups and a certificate: a figure in every field."""
    problem = problem_of(random_graph(29, 6), two_sites(9.0, 1), micro_batches=6, state=parameter_state("adam"))
    layouts = [PlanLayout(("d2", "d0"), (3,), 2, (True, False)), PlanLayout(("d1", "d3"), (2,), 4)]
    plan = build_replicas(problem, layouts, planner="hand")
    return document(problem, plan), problem


def test_every_field_that_is_tampered_with_is_caught() -> None:
    plan, problem = two_replicas()
    steady_s = plan.predicted.steady_s
    check(plan, problem)
    assert plan.replicas[0].shared and plan.sync.groups and any(edge.gradients for edge in plan.replicas[0].edges)
    built: Built = msgspec.json.decode(msgspec.json.encode(plan))
    seen = 0
    for path in leaves(built):
        name = ".".join(str(step) for step in path)
        if name in WORDS or path[0] == "notes":
            continue
        value = at(built, path)
        others: list[Built] = [f"{value}x"] if isinstance(value, str) else []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1, value - 1] if value else [value + 1]  # below 0 is no plan document
        elif isinstance(value, float):
            others = [value * 1.00001 + 1e-6, -1.0]
        for other in others:
            if path[-1] == "loss_stage" and other in (-1, 1):
                continue  # two names of the last stage
            try:
                tampered = msgspec.convert(changed(built, path, other), Plan)
            except msgspec.ValidationError:
                continue  # no plan document at all: a name that is none of a few
            if path[0] != "certificate":  # its search is not what is tested here, and takes long
                tampered = msgspec.structs.replace(tampered, certificate=None)
            found = verify(tampered, question_of(problem), simulated_s=lambda _: steady_s)
            assert not found.holds() and found.differences, (name, value, other)
            assert all(d.field and d.got != d.expected for d in found.differences)
            seen += 1
    assert seen > 120


def test_what_is_missing_or_twice_is_caught() -> None:
    plan, problem = two_replicas()
    built: Built = msgspec.json.decode(msgspec.json.encode(plan))
    within = [("replicas", 0, "stages"), ("replicas", 1, "edges"), ("replicas", 0, "shared")]
    for path in (("replicas",), ("sync", "groups"), *within):
        listed = at(built, path)
        assert isinstance(listed, list) and listed
        for other in ([], listed[:-1], [*listed, listed[0]]):
            found = verify(msgspec.convert(changed(built, path, other), Plan), question_of(problem))
            assert not found.holds(), (path, other)


def test_devices_swapped_or_unknown_or_too_small() -> None:
    problem = problem_of(random_graph(3, 5), fleet_of([1.0, 3.0], 5))
    plan = build_plan(problem, ["d0", "d1"], [2], planner="hand")
    small = fleet_of([1.0, 3.0], 5, memory=[1 << 40, 10])
    found = verify(plan, question_of(problem_of(problem.flow.graph, small)))
    assert [d.field for d in found.differences] == ["replicas[0].stages[1].memory"]
    built: Built = msgspec.json.decode(msgspec.json.encode(plan))
    swapped = changed(
        changed(built, ("replicas", 0, "stages", 0, "device"), "d1"), ("replicas", 0, "stages", 1, "device"), "d0"
    )
    fields = {d.field for d in verify(msgspec.convert(swapped, Plan), question_of(problem)).differences}
    assert {"predicted.step_s", "predicted.fill_s"} <= fields
    twice = changed(built, ("replicas", 0, "stages", 0, "device"), "d1")
    found = verify(msgspec.convert(twice, Plan), question_of(problem))
    (same,) = found.differences
    assert (same.field, same.got) == ("replicas[0].stages[1].device", "d1")
    assert found.bound.status == "unchecked"


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("islands", [((0,), (7,)), ((0, 1, 1),), ()])
def test_islands_of_members_that_are_none_are_differences(islands: tuple[tuple[int, ...], ...], stated: bool) -> None:
    plan, problem = two_replicas()
    groups = tuple(
        msgspec.structs.replace(group, collective=Collective(kind="hierarchical", islands=islands))
        for group in plan.sync.groups
    )
    sync = msgspec.structs.replace(plan.sync, groups=groups)
    other = msgspec.structs.replace(plan, sync=sync, certificate=plan.certificate if stated else None)
    assert "sync.groups[0].collective" in {d.field for d in verify(other, question_of(problem)).differences}


def test_a_period_in_which_nothing_is_summed_is_a_difference_and_not_walked_through() -> None:
    problem = problem_of(random_graph(3, 5), fleet_of([1.0, 3.0], 5))
    for plan in (two_replicas()[0], build_plan(problem, ["d0", "d1"], [2], planner="hand")):
        asked = question_of(problem if len(plan.replicas) == 1 else two_replicas()[1])
        endless = msgspec.structs.replace(plan, sync=msgspec.structs.replace(plan.sync, period=10**15))
        assert verify(endless, asked).differences[0].field == "sync.period"


@pytest.mark.parametrize("limit", [{"max_step_s": 1e-3, "objective": "cost"}, {"max_price": 1e-3}])
def test_limits_that_were_not_asked_are_differences(limit: dict[str, object]) -> None:
    plan, problem = two_replicas()
    other = msgspec.structs.replace(plan, constraints=Constraints(**limit))  # type: ignore[arg-type]
    found = {difference.field for difference in verify(other, question_of(problem)).differences}
    assert found & {"constraints.max_step_s", "constraints.max_price"}


def test_differences_say_by_how_much() -> None:
    plan, problem = two_replicas()
    predicted = msgspec.structs.replace(plan.predicted, sync_s=plan.predicted.sync_s + 2.0)
    (found,) = verify(msgspec.structs.replace(plan, predicted=predicted), question_of(problem)).differences
    assert found.field == "predicted.sync_s"
    assert found.got == plan.predicted.sync_s + 2.0 and found.expected == pytest.approx(plan.predicted.sync_s)
    assert found.by.startswith("+2 (+") and found.by.endswith(" %)")


def test_bad_questions() -> None:
    problem = problem_of(random_graph(3, 3), fleet_of([1.0]))
    fields = {
        "graph": problem.flow.graph,
        "fleet": problem.fleet,
        "micro_batch_size": 2,
        "micro_batches": 4,
        "schedule": "1f1b",
    }
    with pytest.raises(UserError, match="micro_batches: got 0"):
        Question(**{**fields, "micro_batches": 0})  # type: ignore[arg-type]
    fixed = msgspec.structs.replace(problem.flow.graph, batch=3)
    with pytest.raises(UserError, match="got 2, expected 3"):
        Question(**{**fields, "graph": fixed})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="mode 'eval'"):
        Question(**{**fields, "graph": msgspec.structs.replace(problem.flow.graph, mode="eval")})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw"])
@pytest.mark.parametrize("narrow", [False, True])
def test_state_is_counted_as_the_cost_model_does(name: str, narrow: bool) -> None:
    for momentum in (False, True):
        ours = state_bytes(name, momentum=momentum, narrow=narrow)
        theirs = parameter_state(name, momentum=momentum, narrow=narrow)
        assert (ours.master, ours.gradient, ours.optimizer) == (
            theirs.master_bytes,
            theirs.gradient_bytes,
            theirs.optimizer_bytes,
        )
    with pytest.raises(UserError, match="unknown optimizer"):
        state_bytes("lion")


def test_a_compressed_plan_is_timed_by_what_crosses_the_wire() -> None:
    problem = problem_of(gpt_graph(3), fleet_of([1e6, 2e6, 3e6], 4), micro_batches=6)
    packed = plan_compression("uniform", problem, plan_by("even", problem), 20.0)
    check(packed, asked := replace(problem, constraints=packed.constraints))
    (replica,) = packed.replicas
    edge = replica.edges[0]
    assert edge.forward_compression is not None
    smaller = msgspec.structs.replace(edge.forward_compression, wire_bytes=edge.forward_wire_bytes - 1)
    edges = (msgspec.structs.replace(edge, forward_compression=smaller), *replica.edges[1:])
    wrong = msgspec.structs.replace(packed, replicas=(msgspec.structs.replace(replica, edges=edges),))
    fields = {d.field for d in verify(wrong, question_of(asked)).differences}
    assert "replicas[0].edges[0 -> 1].forward_compression.wire_bytes" in fields
