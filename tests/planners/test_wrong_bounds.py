"""Plans that undercut a bound once: each problem is built by hand, with a plan that does what the bound excluded."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from plan_cases import document, operator, parameter, placeholder, simulated_s, tensor
from test_step_bounds import FINE, ROUGH, bound_s

from isthmus.api.make_plan import question_of
from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.fleet import Device, Fleet, Link, Links, LinkTrace, Route
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref
from isthmus.plans import Collective, Constraints, Plan
from isthmus.verification import Prover, verify
from isthmus.verification.decision import Decision
from isthmus.verification.prefixes import Work
from isthmus.verification.reading import GraphReading
from isthmus.verification.stage_seconds import StageSeconds

QUICK = Link(0.0001, 1e9)
NO_VALUE = tensor(batched=False)


def graph_of(*ops: Op) -> OpGraph:
    return OpGraph(name="hand", mode="train", loss=Ref("loss"), ops=ops)


def two_operators(elements: int = 1000, flops: int = 3) -> OpGraph:
    """Of 9 FLOPs for a sample each, both ways."""
    return graph_of(
        placeholder("x", 1, dtype="float32"),
        parameter("v", elements),
        parameter("w", elements),
        operator("a", "x", "v", flops=flops),
        operator("loss", "a", "w", flops=flops, outputs=(NO_VALUE,)),
    )


def device(number: int, speed: float, memory: int = 1 << 40, price: float = 0.0) -> Device:
    return Device(name=f"d{number}", region="here", flops_per_s=speed, memory_bytes=memory, price_per_hour=3600 * price)


def problem_on(graph: OpGraph, devices: list[Device], links: Links, micro_batches: int, **more: object) -> Problem:
    return Problem(
        flow=Flow(graph),
        fleet=Fleet(name="hand", devices=tuple(devices), links=links),
        micro_batch_size=1,
        micro_batches=micro_batches,
        **{"schedule": "1f1b", **more},  # type: ignore[arg-type]
    )


def by_hand(problem: Problem, *layouts: PlanLayout) -> Plan:
    return build_replicas(problem, layouts, planner="hand")


def check(problem: Problem, plan: Plan) -> float:
    known_s = simulated_s(problem, plan)
    for relaxation in (FINE, ROUGH):
        assert bound_s(problem, relaxation, known_s) <= known_s * (1 + 1e-6), relaxation
    return known_s


@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 2), (16, 8)])
def test_pipelines_of_alike_devices_are_as_many_as_there_are_devices(devices: int, micro_batches: int) -> None:
    holds_one = [device(k, 3.0, memory=12_000) for k in range(devices)]
    problem = problem_on(two_operators(), holds_one, Links(default=QUICK), micro_batches)
    pairs = [PlanLayout((f"d{k}", f"d{k + 1}"), (1,), 1) for k in range(0, devices, 2)]
    assert check(problem, by_hand(problem, *pairs)) < 6.1


def test_a_device_that_holds_few_may_hold_all_by_recomputing() -> None:
    graph = graph_of(
        placeholder("x", 1, dtype="float32"),
        parameter("w", 1),
        operator("a", "x", "w", flops=100, saved=100),
        operator("loss", "a", outputs=(NO_VALUE,)),
    )
    devices = [device(k, 100.0, memory=330) for k in range(2)]
    problem = problem_on(graph, devices, Links(default=QUICK), 8, schedule="gpipe")
    assert check(problem, by_hand(problem, *(PlanLayout((d.name,), (), 4) for d in devices))) < 16.1


def test_what_the_first_stage_sends_the_last_one_on_its_device_crosses_no_link() -> None:
    graph = graph_of(
        placeholder("x", 1, dtype="float32"),
        placeholder("y", 1, dtype="float32"),
        placeholder("labels", 1),
        parameter("u", 1),
        parameter("v", 1),
        parameter("w", 1),
        operator("a", "x", "u", flops=1, width=250_000),
        operator("b", "y", "v", flops=100),
        operator("loss", "a", "b", "labels", "w", flops=1, outputs=(NO_VALUE,)),
    )
    terms = Constraints(data_holders=("d0",), labels_stay=True)
    devices, links = [device(0, 3.0), device(1, 300.0)], Links(default=Link(0.1, 1e5))
    problem = problem_on(graph, devices, links, 1, constraints=terms)
    assert check(problem, by_hand(problem, PlanLayout(("d0", "d1", "d0"), (1, 2), 1))) < 4


def test_a_link_with_a_trace_is_as_good_as_it_ever_is() -> None:
    slow_later = LinkTrace((0.0, 1000.0, 2000.0), (0.0, 50.0, 50.0), (1e6, 1.0, 1.0)).mean()
    devices = [device(k, 9.0, memory=12_000) for k in range(2)]
    problem = problem_on(two_operators(), devices, Links(default=slow_later), 2)
    assert check(problem, by_hand(problem, PlanLayout(("d0", "d1"), (1,), 2))) < 10


def frozen(name: str, column: str, flops: int) -> Op:
    return operator(name, column, flops=flops, flops_backward=Affine(0), requires_grad=(False,))


def test_what_runs_ahead_may_be_ahead_of_all_steps_that_are_measured() -> None:
    graph = graph_of(
        placeholder("x", 1, dtype="float32"),
        placeholder("y", 1, dtype="float32"),
        msgspec.structs.replace(parameter("w", 1), outputs=(tensor(1, dtype="float64", batched=False),)),  # one replica
        frozen("a", "x", 100),
        frozen("b", "y", 10),
        operator("loss", "a", "b", "w", flops=80, flops_backward=Affine(0), outputs=(NO_VALUE,)),
    )
    links = Links(default=QUICK, devices=(Route("d1", "d2", Link(10.0, 1e9)),))
    problem = problem_on(graph, [device(k, 100.0) for k in range(3)], links, 10)
    assert check(problem, by_hand(problem, PlanLayout(("d0", "d1", "d2"), (1, 2), 10))) < 9.5


def test_five_replicas_may_be_cheaper_than_four() -> None:
    cheap = [device(k, 3.0, memory=12_000, price=1.0) for k in range(10)]
    dear = [device(k, 30.0, memory=12_000, price=100.0) for k in range(10, 18)]
    terms = Constraints(objective="cost")
    problem = problem_on(two_operators(), [*cheap, *dear], Links(default=QUICK), 5, constraints=terms)
    plan = by_hand(problem, *(PlanLayout((f"d{k}", f"d{k + 1}"), (1,), 1) for k in range(0, 10, 2)))
    decision = Decision(GraphReading(question_of(problem, (5,))), FINE)
    rate = decision.rates({d.name: d.price_per_hour / 3600 for d in problem.fleet.devices})
    assert simulated_s(problem, plan) < 6.5
    assert decision.least_rate(6.5, rate, Work()) <= 10


def test_a_limit_of_the_formula_says_nothing_of_simulated_steps() -> None:
    terms = Constraints(objective="cost")
    problem = problem_on(two_operators(), [device(0, 3.0, price=1.0)], Links(default=QUICK), 2, constraints=terms)
    question = question_of(problem, (2,))
    limited = dataclasses.replace(question, constraints=Constraints(objective="cost", max_step_s=11.0))
    assert Prover(question, priced=True).proves(11.9)
    for asked in (question, limited):
        assert not Prover(asked, priced=True).proves(14.0)


def test_no_bound_is_stated_of_sums_that_one_leader_of_all_makes() -> None:
    devices, links = [device(0, 18.0), device(1, 18.0)], Links(default=Link(0.0, 16_000.0))
    problem = problem_on(two_operators(), devices, links, 3)
    made = document(problem, by_hand(problem, PlanLayout(("d0",), (), 2), PlanLayout(("d1",), (), 1)))
    assert made.certificate is not None
    one_island = Collective(kind="hierarchical", islands=((0, 1),))
    groups = tuple(msgspec.structs.replace(group, collective=one_island) for group in made.sync.groups)
    led = msgspec.structs.replace(made, sync=msgspec.structs.replace(made.sync, groups=groups))
    assert simulated_s(problem, led) < simulated_s(problem, made)
    found = verify(led, question_of(problem, (3,)))
    assert any(difference.field == "sync.groups[0].collective" for difference in found.differences)


def test_a_bound_is_of_plans_with_one_stage_on_each_device_which_others_may_undercut() -> None:
    ops = [placeholder("x", 4, dtype="float32")]
    for k in range(4):
        outputs = (NO_VALUE,) if k == 3 else (tensor(4),)
        ops.append(parameter(f"w{k}", 500_000))
        ops.append(
            operator(f"o{k}" if k < 3 else "loss", f"o{k - 1}" if k else "x", f"w{k}", flops=1000, outputs=outputs)
        )
    devices = [device(k, 1e4) for k in range(2)]
    problem = problem_on(graph_of(*ops), devices, Links(default=Link(0.001, 1e6)), 2)
    made = document(problem, by_hand(problem, PlanLayout(("d0", "d1"), (2,), 2)))
    by_turns = by_hand(problem, PlanLayout(("d0", "d1", "d0", "d1"), (1, 2, 3), 2))
    assert made.certificate is not None and made.certificate.gap < 0.01
    assert simulated_s(problem, by_turns) < 0.9 * made.certificate.lower_bound
    assert "any devices in any order, one stage on each," in made.certificate.question


def test_a_device_sums_through_another_of_its_region_that_is_joined_better() -> None:
    names = {"led": "a", "leader": "a", "b0": "b", "b1": "b"}
    devices = [
        Device(name=n, region=region, flops_per_s=18.0, memory_bytes=1 << 40 if region == "a" else 12_000)
        for n, region in names.items()
    ]
    ends = [end for b in ("b0", "b1") for end in (("led", b), (b, "led"))]
    links = Links(default=Link(0.01, 1e6), intra=QUICK, devices=tuple(Route(*end, Link(50.0, 1e3)) for end in ends))
    problem = problem_on(two_operators(), devices, links, 30)
    layouts = PlanLayout(("led",), (), 8), PlanLayout(("leader",), (), 8), PlanLayout(("b0", "b1"), (1,), 14)
    plan = by_hand(problem, *layouts)
    assert {group.collective.kind for group in plan.sync.groups} == {"hierarchical"}
    assert check(problem, plan) < 8.1
    seconds = StageSeconds(GraphReading(question_of(problem, (30,))), FINE)
    assert (seconds.sums_s(3, 3, 1) <= plan.predicted.sync_s).all()
