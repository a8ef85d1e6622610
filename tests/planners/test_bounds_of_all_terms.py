"""No bound is above the best of all simulated plans: two to five devices, with everything that fleets and jobs may ask.

Each problem draws some of: links of which one way is slow, links with a trace, shared uplinks, memory that binds, data
holders and labels that stay, prices, several numbers of micro-batches, compression, a share of memory left free.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from plan_cases import problem_of, random_graph, simulated_s
from term_cases import every_layout
from tests.tiers import represented_by

from isthmus.api.make_plan import PROVING_WORK, question_of
from isthmus.cost import PlanLayout, Problem, build_replicas, plan_compression, step_price
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links, LinkTrace, Region, Route
from isthmus.planners import plan as plan_by
from isthmus.plans import Constraints, Plan
from isthmus.verification import Prover, is_priced
from isthmus.verification.prefixes import OutOfWork
from isthmus.verification.reading import GraphReading

QUICK = (1, 2, 3, 4, 8)  # others simulate many plans more
TOLERANCE = 1e-6
MOST_SIMULATED = 2_000  # the best by the formula first


class Drawn(NamedTuple):
    problem: Problem
    counts: tuple[int, ...]
    packed: tuple[str, float] | None  # method and ratio


def drawn(seed: int) -> Drawn:
    source = random.Random(f"terms {seed}")
    devices = source.choice((2, 2, 3, 3, 3, 4, 4, 5))
    operators = source.randint(2, {2: 5, 3: 4, 4: 3, 5: 2}[devices])
    counts = source.choice(((1,), (2,), (3,), (4,), (6,), (2, 4), (1, 3), (1, 2, 6)))
    counts = counts if devices < 4 else tuple(c for c in counts if c <= 4) or (4,)
    priced = source.random() < 0.25
    holders = tuple(f"d{k}" for k in range(source.choice((1, 1, 2)))) if source.random() < 0.25 else ()
    terms = Constraints(
        objective="cost" if priced else "time",
        data_holders=holders,
        labels_stay=bool(holders) and source.random() < 0.5,
        memory_headroom=0.1 if source.random() < 0.1 else 0.0,
    )
    problem = problem_of(
        random_graph(source.randrange(10**6), operators),
        fleet(source, devices, priced=priced),
        micro_batches=counts[-1],
        schedule=source.choice(("1f1b", "1f1b", "gpipe")),
        recompute=source.random() < 0.7,
        constraints=terms,
    )
    problem = replace(problem, micro_batch_size=2 * math.lcm(*counts) // counts[-1])
    methods = (("uniform", 8.0), ("adatopk", 8.0), ("int8", 1.0))
    return Drawn(problem, counts, source.choice(methods) if source.random() < 0.1 else None)


def fleet(source: random.Random, count: int, *, priced: bool) -> Fleet:
    speeds = [source.uniform(1, 20) for _ in range(source.choice((1, 2, count)))]
    tight = source.random() < 0.35
    devices = tuple(
        Device(
            name=f"d{k}",
            region=source.choice("ab"),
            flops_per_s=source.choice(speeds),
            memory_bytes=source.randint(150, 1500) if tight else 1 << 40,
            price_per_hour=3600 * source.uniform(0.2, 4) if priced else 0.0,
        )
        for k in range(count)
    )
    quick = 50 if source.random() < 0.4 else 1
    latency_s, rate, spread = source.uniform(0, 2) / quick, source.uniform(5, 200) * quick, source.choice((0.0, 0.5, 2))

    def link(slower: float) -> Link:
        latency = latency_s * math.exp(source.gauss(0, spread))
        return Link(latency, rate / slower * math.exp(source.gauss(0, spread)))

    one_way, traced = source.random() < 0.25, source.random() < 0.15
    routes = list[Route]()
    for a, b in itertools.permutations(devices, 2):
        made = link(30.0 if one_way and a.name < b.name else 1.0)
        if traced and source.random() < 0.5:
            made = changing(source, made)
        routes.append(Route(a.name, b.name, made))
    egress = source.uniform(0, 0.02) * 1e9 if priced else 0.0
    uplinks = [rate * source.uniform(0.2, 1) if source.random() < 0.25 else None for _ in "ab"]
    sites = tuple(
        Region(region=region, uplink_bytes_per_s=uplink, egress_price_per_gb=egress)
        for region, uplink in zip("ab", uplinks, strict=True)
        if any(device.region == region for device in devices) and (egress or uplink is not None)
    )
    return Fleet(name="drawn", devices=devices, links=Links(devices=tuple(routes)), region_info=sites)


def changing(source: random.Random, link: Link) -> Link:
    """The link as its trace has it: now quicker, now slower."""
    times = (0.0, *sorted(source.uniform(1, 200) for _ in range(3)))
    factors = [source.uniform(0.3, 3) for _ in times]
    return LinkTrace(
        times,
        tuple(link.latency_s / factor for factor in factors),
        tuple(link.bandwidth_bytes_per_s * factor for factor in factors),
    ).mean()


def layouts_below(problem: Problem, limit: float, *, priced: bool) -> Iterator[list[PlanLayout]]:
    """Of all plans of which no device needs so long for its own work of a step, or all do not cost so much meanwhile;
    each choice of what recomputes, where there is one replica."""
    reading, fleet = GraphReading(question_of(problem, (problem.micro_batches,))), problem.fleet
    flops, learning = [sum(both) for both in zip(*reading.work, strict=True)], reading.learning

    def least(layouts: list[PlanLayout]) -> float:
        busy_s = {name: 0.0 for layout in layouts for name in layout.order}
        for layout in layouts:
            ends = itertools.pairwise((0, *layout.boundaries, len(flops) - 1))
            for name, (a, b) in zip(layout.order, ends, strict=True):
                if learning[b] > learning[a]:  # others may be ahead of the steps that are measured
                    work = layout.micro_batches * (flops[b] - flops[a])
                    busy_s[name] += work / fleet.device(name).flops_per_s
        rate = sum(fleet.device(name).price_per_hour for name in busy_s) / 3600 if priced else 1.0
        return rate * max(busy_s.values())

    for layouts in every_layout(problem):
        if least(layouts) < limit:
            yield layouts
            if len(layouts) == 1 and problem.recompute:
                for again in itertools.product((False, True), repeat=len(layouts[0].order)):
                    yield [layouts[0]._replace(recompute=again)]


def best(case: Drawn, *, priced: bool) -> tuple[float, Plan | None]:
    """Seconds or price of the best of all plans; infinite where none fits."""

    def look(problem: Problem, plan: Plan) -> None:
        nonlocal least, of
        step_s = simulated_s(problem, plan)
        reached = step_price(plan, problem.fleet, step_s).total if priced else step_s
        if reached < least:
            least, of = reached, plan

    least, of, found = math.inf, None, list[tuple[float, int, Problem, Plan]]()
    problems = [case.problem.cut_into(count) for count in case.counts]
    for problem in problems:
        with contextlib.suppress(FleetTooSmall):
            look(problem, packed(case, problem, plan_by("auto", problem)))
    for problem in problems:
        for layouts in layouts_below(problem, least, priced=priced):
            with contextlib.suppress(FleetTooSmall):
                plan = packed(case, problem, build_replicas(problem, layouts, planner="brute"))
                found.append((plan.predicted.step_s, len(found), problem, plan))
    for _, _, problem, plan in sorted(found, key=lambda one: one[:2])[:MOST_SIMULATED]:
        look(problem, plan)
    return least, of


def packed(case: Drawn, problem: Problem, plan: Plan) -> Plan:
    return plan if case.packed is None else plan_compression(case.packed[0], problem, plan, case.packed[1])


@pytest.mark.parametrize("seed", represented_by(range(500), *QUICK))
def test_no_bound_is_above_the_best_of_all_simulated_plans(seed: int) -> None:
    case = drawn(seed)
    question = question_of(case.problem, case.counts)
    least, plan = best(case, priced=is_priced(question))
    if plan is None:
        return
    question = replace(question, constraints=plan.constraints if case.packed else question.constraints)
    prover = Prover(question, priced=is_priced(question))
    bound = prover.run(1.5 * least, PROVING_WORK, bool, lambda _: None)
    assert bound <= least * (1 + TOLERANCE), plan
    with contextlib.suppress(OutOfWork):
        assert not prover.proves(least * 1.001), plan
