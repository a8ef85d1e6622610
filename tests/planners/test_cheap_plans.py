"""Objective cost: against every plan of small priced fleets, and what is said where nothing has a price."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph, simulated_s
from term_cases import asked, every_plan, every_single, priced_fleet
from test_verify import check, question_of

from isthmus.cost import PlanLayout, build_replicas, preference, step_price
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, resolve_fleet
from isthmus.planners import plan, planner_names
from isthmus.planners.registry import check_constraints
from isthmus.plans import Constraints
from isthmus.verification.prover import Prover


@given(
    seed=st.integers(0, 10**6),
    operators=st.integers(2, 4),
    devices=st.integers(1, 4),
    tight=st.booleans(),
    pinned=st.booleans(),
    labels_stay=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_chain_is_the_cheapest_pipeline(
    seed: int, operators: int, devices: int, tight: bool, pinned: bool, labels_stay: bool
) -> None:
    memory = [300 + (seed * (k + 7)) % 1500 for k in range(devices)] if tight else None
    problem = asked(
        seed,
        operators,
        priced_fleet(seed, devices, memory=memory),
        objective="cost",
        holders=["d0"] if pinned else [],
        labels_stay=pinned and labels_stay,
    )
    best = min((preference(problem, made)[0] for made in every_single(problem)), default=None)
    if best is None:
        with pytest.raises(UserError, match="short"):
            plan("chain", problem)
        return
    made = plan("chain", problem)
    assert preference(problem, made)[0] == pytest.approx(best, rel=1e-8)
    check(made, problem)


@given(
    seed=st.integers(0, 10**6),
    operators=st.integers(1, 3),
    devices=st.integers(2, 3),
    micro_batches=st.integers(2, 4),
    pinned=st.booleans(),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.long
def test_auto_is_within_two_percent_of_the_cheapest_of_all_plans(
    seed: int, operators: int, devices: int, micro_batches: int, pinned: bool
) -> None:
    problem = asked(
        seed,
        operators,
        priced_fleet(seed, devices),
        objective="cost",
        micro_batches=micro_batches,
        holders=["d0", "d1"] if pinned else [],
    )
    best = min(preference(problem, made)[0] for made in every_plan(problem))
    made = plan("auto", problem)
    price = preference(problem, made)[0]
    assert best * (1 - 1e-9) <= price <= 1.02 * best
    check(made, problem)


@given(seed=st.integers(0, 10**6), operators=st.integers(1, 3), devices=st.integers(1, 3), tight=st.booleans())
@settings(max_examples=12, deadline=None)
def test_no_plan_is_cheaper_than_what_is_proven(seed: int, operators: int, devices: int, tight: bool) -> None:
    memory = [300 + (seed * (k + 7)) % 1500 for k in range(devices)] if tight else None
    problem = asked(seed, operators, priced_fleet(seed, devices, memory=memory), objective="cost", micro_batches=3)
    prices = [step_price(made, problem.fleet, simulated_s(problem, made)).total for made in every_plan(problem)]
    if prices:
        bound = Prover(question_of(problem), priced=True).run(min(prices), 3e6, bool, lambda _: None)
        assert 0 < bound <= min(prices) * (1 + 1e-9)


def test_averaging_pays_for_what_leaves_a_site() -> None:
    fleet = priced_fleet(8, 2)
    site = fleet.region_info[0]
    sites = tuple(msgspec.structs.replace(s, egress_price_per_gb=1e9 if s == site else 0.0) for s in fleet.region_info)
    problem = asked(8, 2, msgspec.structs.replace(fleet, region_info=sites), micro_batches=2)
    made = build_replicas(problem, [PlanLayout(("d0",), (), 1), PlanLayout(("d1",), (), 1)], planner="hand")
    # Half of the gradients goes there as a part, and half as a sum, each at 1 per byte.
    assert step_price(made, problem.fleet).egress == pytest.approx(sum(group.size_bytes for group in made.sync.groups))


def test_cheap_and_slow_beats_dear_and_fast_only_where_money_counts() -> None:
    def device(name: str, flops_per_s: float, price: float) -> Device:
        return Device(name=name, region="here", flops_per_s=flops_per_s, memory_bytes=1 << 40, price_per_hour=price)

    near = fleet_of([1.0, 1.0])
    fleet = Fleet(name="two", devices=(device("d0", 1e4, 1.0), device("d1", 3e4, 9.0)), links=near.links)
    problem = problem_of(random_graph(5, 3), fleet, micro_batches=4)
    assert plan("auto", problem).devices == ("d1",)
    cheap = plan("auto", replace(problem, constraints=Constraints(objective="cost")))
    assert cheap.devices == ("d0",)
    assert step_price(cheap, fleet).total == pytest.approx(cheap.predicted.step_s / 3600)
    assert "d1 is left out: no plan that was found is cheaper with it" in cheap.notes


def test_without_prices_the_fastest_is_chosen_and_it_is_said() -> None:
    problem = problem_of(random_graph(5, 4), fleet_of([1.0, 4.0]), constraints=Constraints(objective="cost"))
    for name in ("auto", "chain"):
        made = plan(name, problem)
        timed = plan(name, replace(problem, constraints=Constraints()))
        assert made.replicas == timed.replicas
        assert "nothing in the fleet has a price" in made.notes[0] and made.constraints == problem.constraints
        check(made, problem)


@pytest.mark.long
def test_a_larger_fleet_is_cheaper_than_the_fastest_plan() -> None:
    fleet = resolve_fleet("random:7:3")
    devices = tuple(
        msgspec.structs.replace(d, price_per_hour=1.0 + k % 4, flops_per_s=d.flops_per_s / 1e6)
        for k, d in enumerate(fleet.devices)
    )
    problem = problem_of(gpt_graph(2), msgspec.structs.replace(fleet, devices=devices), micro_batches=8)
    fast, cheap = plan("auto", problem), plan("auto", replace(problem, constraints=Constraints(objective="cost")))
    assert step_price(cheap, problem.fleet).total < step_price(fast, problem.fleet).total
    check(cheap, replace(problem, constraints=Constraints(objective="cost")))


def test_who_can_minimise_money() -> None:
    for name in set(planner_names()) - {"auto", "chain"}:
        with pytest.raises(UserError, match=rf"plan.objective: got 'cost', .*'{name}' cannot .* 'auto' or 'chain'"):
            check_constraints(name, Constraints(objective="cost"))
