"""Problems with prices and places: priced fleets of two sites, and every plan that respects a problem's terms."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence

from plan_cases import problem_of, random_graph

from isthmus.cost import PlanLayout, Problem, broken_constraint, build_plan, build_replicas
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links, Region, Route
from isthmus.graph import cuts
from isthmus.plans import Constraints, Objective, Plan


def priced_fleet(seed: int, devices: int, *, memory: Sequence[int] | None = None, egress: float = 1.0) -> Fleet:
    """Sites east and west. A device-second and a hundred bytes that leave a site cost about the same."""
    rng = random.Random(seed)
    made = tuple(
        Device(
            name=f"d{i}",
            region="east" if i % 2 else "west",
            flops_per_s=rng.choice([10.0, 20.0, rng.uniform(5, 50)]),
            memory_bytes=memory[i] if memory else 1 << 40,
            price_per_hour=3600 * rng.choice([1.0, rng.uniform(0.2, 4)]),
        )
        for i in range(devices)
    )
    routes = tuple(
        Route(a.name, b.name, Link(rng.choice([0.0, rng.uniform(0, 2)]), rng.uniform(5, 200)))
        for a, b in itertools.permutations(made, 2)
    )
    sites = tuple(
        Region(region=r, egress_price_per_gb=egress * 1e9 * rng.choice([0.0, rng.uniform(0, 0.02)]))
        for r in dict.fromkeys(d.region for d in made)
    )
    return Fleet(name="priced", devices=made, links=Links(devices=routes), region_info=sites)


def asked(
    seed: int,
    operators: int,
    fleet: Fleet,
    *,
    objective: Objective = "time",
    holders: Sequence[str] = (),
    labels_stay: bool = False,
    micro_batches: int | None = None,
) -> Problem:
    rng = random.Random(seed)
    return problem_of(
        random_graph(seed, operators),
        fleet,
        micro_batches=micro_batches or rng.choice([1, 2, 4]),
        constraints=Constraints(objective=objective, data_holders=tuple(holders), labels_stay=labels_stay),
    )


def orders(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Every order of every subset, and those that end where they began."""
    names = problem.fleet.names
    for size in range(1, len(names) + 1):
        for order in itertools.permutations(names, size):
            yield order
            if size > 1:
                yield (*order, order[0])


def every_single(problem: Problem) -> Iterator[Plan]:
    """All pipelines that fit and respect the terms. A device comes twice only where labels stay."""
    places = [cut.position for cut in cuts(problem.flow)]
    for order in orders(problem):
        if len(set(order)) < len(order) and not problem.constraints.labels_stay:
            continue
        for boundaries in itertools.combinations(places, len(order) - 1):
            if broken_constraint(problem, order, boundaries) is None:
                try:
                    yield build_plan(problem, order, boundaries, planner="brute")
                except FleetTooSmall:
                    continue


def every_plan(problem: Problem) -> Iterator[Plan]:
    """All plans of any number of replicas; small problems only."""
    for layouts in every_layout(problem):
        with contextlib.suppress(FleetTooSmall):
            yield build_replicas(problem, layouts, planner="brute")


def every_layout(problem: Problem) -> Iterator[list[PlanLayout]]:
    """Of all plans that respect the terms, whether they fit or not."""
    places = [cut.position for cut in cuts(problem.flow)]
    for order in orders(problem):
        if len(set(order)) < len(order) and not problem.constraints.labels_stay:
            continue
        for boundaries in itertools.combinations(places, len(order) - 1):
            if broken_constraint(problem, order, boundaries) is None:
                yield [PlanLayout(order, boundaries, problem.micro_batches)]
    for groups in _groups(problem.fleet.names):
        if not 1 < len(groups) <= problem.micro_batches or max(map(len, groups)) > len(places) + 1:
            continue
        choices = [list(itertools.combinations(places, len(group) - 1)) for group in groups]
        for inner in itertools.combinations(range(1, problem.micro_batches), len(groups) - 1):
            shares = [b - a for a, b in itertools.pairwise((0, *inner, problem.micro_batches))]
            for boundaries in itertools.product(*choices):
                layouts = [PlanLayout(g, b, m) for g, b, m in zip(groups, boundaries, shares, strict=True)]
                if all(broken_constraint(problem, x.order, x.boundaries) is None for x in layouts):
                    for ordered in itertools.permutations(layouts):  # what an average takes depends on their order
                        yield list(ordered)


def _groups(devices: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every way to put some of the devices into ordered groups; groups in one order."""
    if not devices:
        yield []
        return
    first, rest = devices[0], devices[1:]
    for groups in _groups(rest):
        yield groups
        yield [(first,), *groups]
        for k, group in enumerate(groups):
            for at in range(len(group) + 1):
                yield [*groups[:k], (*group[:at], first, *group[at:]), *groups[k + 1 :]]
