"""The exact planner against brute force, and what must hold of its plans."""

from __future__ import annotations

import dataclasses
import itertools
import random

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import (
    all_orders_of,
    brute_force,
    fits,
    fleet_of,
    gpt_graph,
    operator,
    placeholder,
    problem_of,
    random_graph,
    tensor,
)

from isthmus.cost import Problem, build_plan, parameter_state, place
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table, stage_bytes
from isthmus.cost.network import network_of
from isthmus.cost.pipelines import Trials, timed
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links, with_memory
from isthmus.graph import OpGraph, Ref, assign, partition
from isthmus.planners import plan
from isthmus.planners.search.cuts import ThresholdSearch
from isthmus.planners.search.relaxation import Relaxation, StageTables
from isthmus.planners.search.routes import Routes, all_orders, fixed_placement_of, one_order
from isthmus.plans import Plan, load_plan, save_plan

INFINITE = float("inf")


def random_problem(seed: int, operators: int, devices: int, *, memory: bool, recompute: bool = True) -> Problem:
    rng = random.Random(seed)
    speeds = [rng.choice([10.0, 20.0, rng.uniform(5, 50)]) for _ in range(devices)]
    sizes = [rng.randint(200, 4000) for _ in range(devices)] if memory else None
    return problem_of(
        random_graph(seed, operators),
        fleet_of(speeds, seed, memory=sizes),
        micro_batches=rng.choice([1, 2, 4, 16]),
        schedule=rng.choice(["gpipe", "1f1b"]),
        recompute=recompute,
    )


def routes_of(problem: Problem) -> Routes:
    network = network_of(problem)
    return all_orders(network, fixed_placement_of(problem, network), memory_binds=True)


def search_over(problem: Problem, routes: Routes) -> tuple[ThresholdSearch, float]:
    """Over stages that keep what their forward saved: `every_pipeline` tries which may recompute."""
    network = network_of(problem)
    search = ThresholdSearch(Relaxation(problem, network, StageTables(Blocks(problem)), routes), problem.micro_batches)
    return search, search.run()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 4), st.booleans())
@example(99999, 2, 3, True)  # fits only where the second stage alone recomputes
def test_one_order_is_cut_as_well_as_by_brute_force(seed: int, operators: int, devices: int, memory: bool) -> None:
    problem = random_problem(seed, operators, devices, memory=memory, recompute=False)
    best = brute_force(problem, [problem.fleet.names])
    search, bound = search_over(problem, one_order(range(devices)))
    assert (search.upper_s, bound) == pytest.approx((best, best), rel=1e-8)
    if search.best is not None:
        placed = place(problem, problem.fleet.names, Blocks(problem).boundaries(search.best.path.cut))
        assert fits(placed)
        assert placed.times.step_s(problem.micro_batches) == pytest.approx(best, rel=1e-8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 4), st.booleans())
def test_every_order_and_subset_is_searched_as_by_brute_force(
    seed: int, operators: int, devices: int, memory: bool
) -> None:
    problem = random_problem(seed, operators, devices, memory=memory, recompute=False)
    best = brute_force(problem, all_orders_of(problem.fleet))
    search, bound = search_over(problem, routes_of(problem))
    assert (search.upper_s, bound) == pytest.approx((best, best), rel=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 4))
def test_a_row_of_the_arrays_is_the_closed_form_of_the_stage_graphs(seed: int, operators: int, devices: int) -> None:
    problem = random_problem(seed, operators, devices, memory=seed % 2 == 0)
    search, _ = search_over(problem, one_order(range(devices)))
    if search.best is None:
        return
    blocks, cut = Blocks(problem), search.best.path.cut
    table = cut_table(blocks, np.array([(0, *cut, blocks.count)]))
    row = timed(problem, network_of(problem), Trials(table, np.zeros(1, dtype=np.int64), np.arange(devices)[None]))
    placed = place(problem, problem.fleet.names, blocks.boundaries(cut))
    times, sizes = placed.times, placed.sizes
    assert row.busy_s[0] == pytest.approx(times.bottleneck[0])
    assert row.fill_s[0] == pytest.approx(times.fill_s + times.shared_s)
    memory = [size.memory(1).total for size in sizes]
    needs = [stage_bytes(blocks, a, [b], 1)[0] for a, b in itertools.pairwise((0, *cut, blocks.count))]
    assert needs == memory
    room = {name: max(1, size) for name, size in zip(problem.fleet.names, memory, strict=True)}
    tight = dataclasses.replace(problem, fleet=with_memory(problem.fleet, room))
    held = timed(tight, network_of(tight), Trials(table, np.zeros(1, dtype=np.int64), np.arange(devices)[None]))
    assert held.held[0].min() >= 1
    if problem.schedule == "1f1b" and (held.held[0] < problem.micro_batches).any():
        assert held.round_trip_s[0] == pytest.approx(times.round_trips_s)


def test_the_relaxation_alone_does_not_settle_every_graph() -> None:
    """Skips that cross two cuts need the labelled search: without it these cases would be left unproven."""
    searches = [
        search_over(problem, routes_of(problem))[0]
        for problem in (random_problem(seed, 7, 4, memory=False) for seed in range(30))
    ]
    assert any(search.states > 0 for search in searches)
    assert all(not search.unresolved for search in searches)


def test_interchangeable_devices_are_not_tried_in_every_order() -> None:
    twins = Fleet(
        name="twins",
        devices=tuple(Device(name=f"d{i}", region="here", flops_per_s=1e3, memory_bytes=10**9) for i in range(5)),
        links=Links(default=Link(0.1, 1e3)),
    )
    problem = problem_of(random_graph(1, 5), twins)
    network = network_of(problem)
    assert len(all_orders(network, fixed_placement_of(problem, network), memory_binds=False).states) == 6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(1, 4), st.booleans())
def test_a_plan_is_consistent_with_its_stage_graphs(seed: int, operators: int, devices: int, memory: bool) -> None:
    problem = random_problem(seed, operators, devices, memory=memory)
    try:
        made = plan("chain", problem)
    except FleetTooSmall:
        assert brute_force(problem, all_orders_of(problem.fleet)) == INFINITE
        return
    flow = problem.flow
    graphs = partition(flow, assign(flow, made.boundaries()))
    (replica,) = made.replicas
    assert sum(e.forward_bytes for e in replica.edges) == sum(c.spec.nbytes(2) for g in graphs for c in g.receives)
    assert sum(e.backward_bytes for e in replica.edges) == sum(
        c.spec.nbytes(2) for g in graphs for c in g.receives if c.gradient
    )
    for stage in made.stages:
        assert stage.memory.total <= problem.fleet.device(stage.device).memory_bytes
    assert {name.split(" ")[0] for name in made.notes} == set(problem.fleet.names)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made
    assert plan("chain", problem) == made


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(1, 4), st.booleans())
def test_chain_is_never_slower_than_even(seed: int, operators: int, devices: int, memory: bool) -> None:
    problem = random_problem(seed, operators, devices, memory=memory)
    try:
        baseline = plan("even", problem)
    except FleetTooSmall:
        return
    assert plan("chain", problem).predicted.step_s <= baseline.predicted.step_s * (1 + 1e-9)


def _fleet(speeds: list[float], *, memory: int = 1 << 40, latency: float = 1e-3, bandwidth: float = 1e8) -> Fleet:
    devices = tuple(
        Device(name=f"d{i}", region="here", flops_per_s=s, memory_bytes=memory) for i, s in enumerate(speeds)
    )
    return Fleet(name="near", devices=devices, links=Links(default=Link(latency, bandwidth)))


def test_a_gpt_on_unequal_devices_beats_even_and_is_proven_optimal() -> None:
    problem = problem_of(gpt_graph(2), _fleet([1e9, 3e9, 2e9]), micro_batches=8)
    made, baseline = plan("chain", problem), plan("even", problem)
    assert made.predicted.step_s < 0.8 * baseline.predicted.step_s
    assert made.replicas[0].shared[0].name == "module.wte"


def test_a_device_behind_a_slow_link_is_left_out_and_the_plan_says_so() -> None:
    near = _fleet([1e9, 1e9, 1e9])
    slow = Link(5.0, 1e4)
    fleet = Fleet(
        name="far",
        devices=(*near.devices[:2], Device(name="away", region="there", flops_per_s=1e9, memory_bytes=1 << 40)),
        links=Links(default=slow, intra=Link(1e-3, 1e9)),
    )
    made = plan("chain", problem_of(gpt_graph(1), fleet, micro_batches=8))
    assert sorted(s.device for s in made.stages) == ["d0", "d1"]
    assert "away is left out: no plan that was found is faster with it" in made.notes


def test_many_devices_are_ordered_by_region() -> None:
    devices = tuple(Device(name=f"d{i}", region="ab"[i % 2], flops_per_s=1e9, memory_bytes=1 << 40) for i in range(8))
    fleet = Fleet(name="two", devices=devices, links=Links(default=Link(0.05, 1e7), intra=Link(1e-4, 1e9)))
    made = plan("chain", problem_of(gpt_graph(4), fleet, micro_batches=64))
    regions = [fleet.device(s.device).region for s in made.stages]
    assert len(regions) > 4
    assert sum(a != b for a, b in itertools.pairwise(regions)) == 1
    assert made.predicted.step_s < plan("even", problem_of(gpt_graph(4), fleet, micro_batches=64)).predicted.step_s


def test_memory_decides_how_many_micro_batches_are_in_flight_and_is_in_the_prediction() -> None:
    graph = gpt_graph(2, vocabulary=50)
    roomy = plan("chain", problem_of(graph, _fleet([1e8, 1e8], latency=0.5, bandwidth=1e9), micro_batches=32))
    assert len(roomy.stages) == 2
    most = max(s.memory.total for s in roomy.stages)
    fleet = _fleet([1e8, 1e8], latency=0.5, bandwidth=1e9, memory=most // 2)
    tight, keeping = (problem_of(graph, fleet, micro_batches=32, recompute=allowed) for allowed in (True, False))
    squeezed = plan("chain", keeping)
    assert all(s.memory.total <= most // 2 for s in squeezed.stages)
    assert max(squeezed.replica.schedule.in_flight) < max(roomy.replica.schedule.in_flight)
    unaware = build_plan(keeping, ["d0", "d1"], roomy.boundaries(), planner="same")
    assert unaware.predicted.bottleneck.startswith("memory of device d0")
    assert roomy.predicted.step_s < squeezed.predicted.step_s < 0.9 * unaware.predicted.step_s
    # A first stage that recomputes holds as many as it wants: slower than with room, faster than throttled.
    again = plan("chain", tight)
    assert [s.recompute for s in again.stages] == [True, False]
    assert all(s.memory.total <= most // 2 for s in again.stages)
    assert roomy.predicted.step_s < again.predicted.step_s < squeezed.predicted.step_s


def test_too_small_a_fleet_names_a_device_and_the_missing_bytes() -> None:
    graph = OpGraph(
        name="one",
        mode="train",
        loss=Ref("loss"),
        ops=(placeholder("x", 1), operator("loss", "x", flops=1, saved=100, outputs=(tensor(batched=False),))),
    )
    words = (
        r"'one' does not fit fleet 'near': .* device d0 would have to hold 200 B, offers 150 B: 50 B short "
        r"\(the whole model needs 200 B, the fleet offers 300 B\)"
    )
    with pytest.raises(FleetTooSmall, match=words):
        plan("chain", problem_of(graph, _fleet([1.0, 1.0], memory=150)))


def test_even_refuses_what_does_not_fit() -> None:
    problem = problem_of(gpt_graph(1), _fleet([1e9, 1e9], memory=1 << 10), state=parameter_state("adamw"))
    with pytest.raises(FleetTooSmall, match=r"stage 0 on device d0 needs .* short"):
        plan("even", problem)


def test_a_plan_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = plan("chain", problem_of(gpt_graph(1), _fleet([1e9, 2e9])))
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made
