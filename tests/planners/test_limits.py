"""Cheapest within a deadline, fastest within a budget: against every pipeline of small fleets."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations
from math import inf

import msgspec
import pytest
from plan_cases import all_orders_of, document, fleet_of, problem_of, random_graph
from test_verify import check, question_of
from tests.tiers import represented_by

from isthmus.cost import Problem, build_plan, step_price
from isthmus.cost.price import beyond_limit
from isthmus.errors import FleetTooSmall, UserError
from isthmus.graph import cuts
from isthmus.planners import plan
from isthmus.plans import Constraints
from isthmus.verification import verify


def priced(seed: int) -> Problem:
    fleet = fleet_of([3.0, 8.0, 30.0], seed)
    hours = zip(fleet.devices, (1.0, 4.0, 30.0), strict=True)
    devices = tuple(msgspec.structs.replace(device, price_per_hour=price) for device, price in hours)
    return problem_of(random_graph(seed, 5), msgspec.structs.replace(fleet, devices=devices))


@functools.cache
def every_pair(seed: int) -> list[tuple[float, float]]:
    """Seconds and the price of 1,000 steps of every pipeline of `priced`."""
    problem = priced(seed)
    places = [cut.position for cut in cuts(problem.flow)]
    made = [
        build_plan(problem, order, boundaries, planner="all")
        for order in all_orders_of(problem.fleet)
        for boundaries in combinations(places, len(order) - 1)
    ]
    return [(p.predicted.step_s, 1000 * step_price(p, problem.fleet).total) for p in made]


@pytest.mark.parametrize("seed", represented_by(range(2), 1))
@pytest.mark.parametrize("share", represented_by([0.0, 0.3, 0.8], 0.3))
@pytest.mark.parametrize("limited", ["max_step_s", "max_price"])
def test_the_best_within_the_limit(seed: int, share: float, limited: str) -> None:
    problem = priced(seed)
    pairs = every_pair(seed)
    mine, other = (1, 0) if limited == "max_step_s" else (0, 1)
    values = sorted(pair[other] for pair in pairs)
    limit = values[int(share * (len(values) - 1))]
    best = min(pair[mine] for pair in pairs if pair[other] <= limit)
    objective = "cost" if limited == "max_step_s" else "time"
    asked = replace(problem, constraints=Constraints(objective=objective, **{limited: limit}))
    made = plan("chain", asked)
    found = made.predicted.step_s, 1000 * step_price(made, problem.fleet).total
    assert found[other] <= limit * (1 + 1e-9)
    assert found[mine] == pytest.approx(best)
    check(made, asked)
    several = plan("auto", asked)
    check(several, asked)
    reached = several.predicted.step_s, 1000 * step_price(several, problem.fleet).total
    assert reached[other] <= limit * (1 + 1e-9) and reached[mine] <= best * (1 + 1e-9)


def test_the_certificate_says_the_limit() -> None:
    problem = priced(1)
    cheapest = min(price for _, price in every_pair(1))
    asked = replace(problem, constraints=Constraints(max_price=1.01 * cheapest))
    dear = document(asked, plan("even", asked.timed()))
    assert beyond_limit(asked, dear) is not None
    assert dear.certificate is not None and 0 <= dear.certificate.gap < inf
    assert f"at most {asked.constraints.max_price:g} for 1,000 steps" in dear.certificate.question


@pytest.mark.parametrize("planner", represented_by(["auto", "chain"], "chain"))
def test_what_cannot_be_kept_is_refused_with_the_nearest(planner: str) -> None:
    problem = priced(1)
    with pytest.raises(FleetTooSmall, match=r"plan\.max_step: got 1 ms, which no plan .* the fastest takes \d"):
        plan(planner, replace(problem, constraints=Constraints(objective="cost", max_step_s=0.001)))
    with pytest.raises(FleetTooSmall, match=r"plan\.max_price: got 0\.001, which no plan .* the cheapest costs \d"):
        plan(planner, replace(problem, constraints=Constraints(max_price=0.001)))


def test_a_plan_beyond_the_limit_does_not_pass_the_check() -> None:
    problem = priced(1)
    made = plan("chain", problem)
    within = replace(problem, constraints=Constraints(max_price=1e-3))
    fields = {d.field for d in verify(made, question_of(within)).differences}
    assert "constraints.max_price" in fields


def test_a_limit_belongs_to_the_other_objective() -> None:
    with pytest.raises(UserError, match="max_step: got 1 s with objective 'time'"):
        Constraints(max_step_s=1.0)
    with pytest.raises(UserError, match="max_price: got 1 with objective 'cost'"):
        Constraints(objective="cost", max_price=1.0)
    with pytest.raises(UserError, match=r"plan\.max_price: planner 'even' knows no prices: choose 'auto' or 'chain'"):
        plan("even", replace(priced(1), constraints=Constraints(max_price=1.0)))
