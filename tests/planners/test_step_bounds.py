"""No bound is above the best simulated plan, whatever is distinguished; and where it is nearly attained."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest
from plan_cases import (
    document,
    fleet_of,
    gpt_graph,
    operator,
    parameter,
    placeholder,
    problem_of,
    random_graph,
    simulated_s,
    tensor,
)
from term_cases import every_plan
from tests.tiers import represented_by

from isthmus.api.make_plan import Proving, question_of, with_bound
from isthmus.api.observer import Silent
from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.graph import Affine, Op, OpGraph, Ref, cuts
from isthmus.planners import plan as plan_by
from isthmus.plans import Constraints
from isthmus.verification import verify
from isthmus.verification.decision import Decision
from isthmus.verification.prefixes import Work
from isthmus.verification.reading import GraphReading
from isthmus.verification.stage_figures import StageFigures
from isthmus.verification.stage_seconds import Relaxation

FINE, ROUGH = Relaxation(64, 10**6), Relaxation(4, 3)
MOST_PLANS = 1500


def bound_s(problem: Problem, relaxation: Relaxation, known_s: float) -> float:
    """By bisection, up to twice what is known."""
    decision = Decision(GraphReading(question_of(problem, (problem.micro_batches,))), relaxation)
    low, high = 0.0, 2 * known_s
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if decision.below(middle, Work()) else (middle, high)
    return low


def drawn(seed: int) -> Problem:
    """One to three devices; some lack memory, some have quick links, some fleets have one data holder."""
    source = random.Random(seed)
    devices = source.choice((1, 2, 2, 3, 3))
    memory = [source.randint(150, 1500) for _ in range(devices)] if source.random() < 0.4 else None
    fleet = fleet_of([source.uniform(1, 20) for _ in range(devices)], source.randrange(10**6), memory=memory)
    if source.random() < 0.3:
        routes = tuple(
            msgspec.structs.replace(r, link=Link(r.link.latency_s / 20, r.link.bandwidth_bytes_per_s * 50))
            for r in fleet.links.devices
        )
        fleet = msgspec.structs.replace(fleet, links=Links(devices=routes))
    held = Constraints(data_holders=("d0",), labels_stay=source.random() < 0.5)
    return problem_of(
        random_graph(source.randrange(10**6), source.randint(2, 4 if devices == 3 else 5)),
        fleet,
        micro_batches=source.choice((1, 2, 3, 4, 6)),
        schedule=source.choice(("1f1b", "gpipe")),
        recompute=source.random() < 0.7,
        constraints=held if source.random() < 0.25 else Constraints(),
    )


def widened(seed: int) -> Problem:
    """Two or three alike devices, that hold all or about a half; towers, some of them frozen, that a head joins."""
    source = random.Random(seed)
    count, towers = source.choice((2, 2, 2, 3)), source.randint(1, 2)
    ops, ends = list[Op](), list[str]()
    for tower in range(towers):
        learns = tower == 0 or source.random() < 0.5
        last = f"x{tower}"
        ops.append(placeholder(last, 2, dtype="float32"))
        for k in range(source.randint(1, 4 - towers - count // 3)):
            name, flops = f"t{tower}.{k}", source.randint(1, 40)
            ops.append(parameter(f"{name}.w", source.randint(4, 60), trained=learns))
            more = {} if learns else {"requires_grad": (False,), "flops_backward": Affine(0)}
            saved, width = source.randint(0, 40), source.randint(1, 12)
            ops.append(operator(name, last, f"{name}.w", flops=flops, saved=saved, width=width, **more))
            last = name
        ends.append(last)
    ops += [placeholder("labels", 1), parameter("head.w", source.randint(4, 60))]
    flops, saved, scalar = source.randint(1, 40), source.randint(0, 20), (tensor(batched=False),)
    ops.append(operator("loss", *ends, "labels", "head.w", flops=flops, saved=saved, outputs=scalar))
    graph = OpGraph(name="towers", mode="train", ops=tuple(ops), loss=Ref("loss"))
    memory = source.choice((1 << 40, source.randint(300, 1500)))
    devices = tuple(Device(name=f"d{k}", region="here", flops_per_s=10.0, memory_bytes=memory) for k in range(count))
    link = Link(source.choice((0.0, 1.0, 10.0)), source.choice((100.0, 10_000.0)))
    held = Constraints(data_holders=("d0",), labels_stay=source.random() < 0.5)
    return problem_of(
        graph,
        Fleet(name="alike", devices=devices, links=Links(default=link)),
        micro_batches=source.choice((2, 3)),
        schedule=source.choice(("1f1b", "gpipe")),
        recompute=source.random() < 0.7,
        constraints=held if source.random() < 0.3 else Constraints(),
    )


QUICK = (*range(1, 11), 12, 13)  # others simulate many plans more


@pytest.mark.parametrize("drawn", [drawn, widened])
@pytest.mark.parametrize("seed", represented_by(range(500), *QUICK))
def test_no_bound_is_above_the_best_of_all_simulated_plans(seed: int, drawn: Callable[[int], Problem]) -> None:
    problem = drawn(seed)
    plans = [plan for plan, _ in zip(every_plan(problem), range(MOST_PLANS), strict=False)]
    best_s = min((simulated_s(problem, plan) for plan in plans), default=float("inf"))
    for relaxation in (FINE, ROUGH) if plans else ():
        assert bound_s(problem, relaxation, best_s) <= best_s * (1 + 1e-6), relaxation


def sites(seed: int) -> Fleet:
    """Three to five devices at up to three sites, with quick links within each."""
    source = random.Random(seed)
    devices = tuple(
        Device(name=f"d{k}", region=source.choice("abc"), flops_per_s=source.uniform(1, 20), memory_bytes=1 << 40)
        for k in range(source.randint(3, 5))
    )
    regions = sorted({device.region for device in devices})
    near, far = Link(0.1, source.uniform(100, 2000)), Link(source.uniform(0, 1.5), source.uniform(20, 400))
    routes = tuple(Route(a, b, near if a == b else far) for a in regions for b in regions)
    return Fleet(name="sites", devices=devices, links=Links(regions=routes))


@pytest.mark.parametrize("seed", represented_by(range(60), 1, 2, 3, 4))
def test_no_bound_is_above_replicas_of_several_sites(seed: int) -> None:
    """Of which most are one device, so that what their sums take counts."""
    source, found = random.Random(seed), list[float]()
    problem = problem_of(
        random_graph(source.randrange(10**6), source.randint(2, 5)), sites(seed), micro_batches=source.choice((4, 6, 8))
    )
    places = [cut.position for cut in cuts(problem.flow)]
    for _ in range(60):
        names = source.sample(problem.fleet.names, source.randint(2, len(problem.fleet.names)))
        groups = [[names[0]]]
        for name in names[1:]:
            groups += [[name]] if source.random() < 0.7 else []
            groups[-1] += [name] if name not in groups[-1] else []
        shares = [1] * len(groups)
        for _ in range(problem.micro_batches - len(groups)):
            shares[source.randrange(len(groups))] += 1
        try:
            layouts = [
                PlanLayout(tuple(group), tuple(sorted(source.sample(places, len(group) - 1))), share)
                for group, share in zip(groups, shares, strict=True)
            ]
            found.append(simulated_s(problem, build_replicas(problem, layouts, planner="drawn")))
        except (UserError, ValueError):  # it does not fit, or there are fewer places
            continue
    assert bound_s(problem, FINE, min(found)) <= min(found) * (1 + 1e-6)


def test_replicas_on_alike_devices_are_proven_to_a_few_percent_by_little_work() -> None:
    routes = Links(default=Link(0.001, 1e9))
    fleet = fleet_of([1e9] * 6)
    problem = problem_of(gpt_graph(3), msgspec.structs.replace(fleet, links=routes), micro_batches=16)
    layouts = [PlanLayout((name,), (), share) for name, share in zip(fleet.names, (3, 3, 3, 3, 2, 2), strict=True)]
    made = document(problem, build_replicas(problem, layouts, planner="hand"))
    assert made.certificate is not None and made.certificate.gap < 0.1
    found = verify(made, question_of(problem, (problem.micro_batches,)))
    assert found.holds() and found.bound.status == "proven"


def test_more_is_distinguished_where_it_proves_more() -> None:
    problem = problem_of(random_graph(3, 8), fleet_of([1.0, 2.0, 3.0, 4.0], 4), micro_batches=4)
    known_s = simulated_s(problem, plan_by("even", problem))
    assert bound_s(problem, ROUGH, known_s) <= bound_s(problem, FINE, known_s) * (1 + 1e-6)


def test_a_bound_that_is_raised_for_a_time_says_how_far_it_is() -> None:
    said = list[str]()

    class Listener(Silent):
        def note(self, text: str) -> None:
            said.append(text)

    problem = problem_of(gpt_graph(2), fleet_of([1e6, 2e6, 3e6, 4e6], 4), micro_batches=4)
    plan = plan_by("even", problem)
    steady = msgspec.structs.replace(plan.predicted, steady_s=2 * plan.predicted.step_s)
    made = with_bound(problem, msgspec.structs.replace(plan, predicted=steady), (4,), Proving(10.0, Listener()))
    assert made.certificate is not None and made.certificate.gap > 0
    assert said and all("above the best plan with one stage per device after" in text for text in said)


@pytest.mark.parametrize("cells", [4, 64])
def test_a_stage_works_in_no_less_memory_than_its_cells_say(cells: int) -> None:
    source = random.Random(cells)
    graph = random_graph(5, 12)
    working = [msgspec.structs.replace(op, working_bytes=Affine(source.randrange(1000))) for op in graph.ops]
    problem = problem_of(msgspec.structs.replace(graph, ops=tuple(working)), fleet_of([1, 1], 0))
    reading = GraphReading(question_of(problem, (problem.micro_batches,)))
    figures = StageFigures(reading, cells)
    for begin, end in itertools.combinations(figures.edges, 2):
        cell = [
            next(k for k in range(figures.count) if figures.first[k] <= at <= figures.last[k]) for at in (begin, end)
        ]
        least, needed = figures.working[cell[0], cell[1]], max(reading.at_work[begin:end])
        assert least == needed if cells == 64 else least <= needed
    assert figures.working.max() > 0
