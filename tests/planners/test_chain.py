"""The planner of one pipeline against brute force, and what must hold of its plans."""

from __future__ import annotations

import dataclasses
import itertools
import random
from functools import partial

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
    simulated_s,
    tensor,
)

from isthmus.cost import Problem, build_plan, parameter_state, place
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table, every_cut, run_table, stage_bytes
from isthmus.cost.network import network_of
from isthmus.cost.pipelines import Trials, timed
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links, with_memory
from isthmus.graph import OpGraph, Ref, assign, partition
from isthmus.planners import plan
from isthmus.planners.search.cuts import cut_orders
from isthmus.plans import Constraints, Plan, load_plan, save_plan

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


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.booleans())
def test_a_run_of_blocks_has_the_figures_of_that_stage_in_any_cut(seed: int, operators: int, again: bool) -> None:
    problem = random_problem(seed, operators, 1, memory=False)
    blocks = Blocks(problem, recompute=again)
    runs = run_table(blocks)
    for stages in range(1, blocks.count + 1):
        table = cut_table(blocks, every_cut(blocks, stages))
        for k, s in itertools.product(range(len(table.ends)), range(stages)):
            run = tuple(table.ends[k, s : s + 2])
            assert runs.work[run] == pytest.approx(table.forward_work[k, s] + table.backward_work[k, s])
            assert runs.fixed_bytes[run] == table.fixed_bytes[k, s] - table.shared_gradient[k, s].sum()
            assert runs.each_bytes[run] == table.saved_bytes[k, s] + table.received_bytes[k, s]
            kinds = (table.forward, table.backward, table.shared, table.shared_gradient, table.shared_count)
            for early, later, amount in zip(runs.early, runs.later, kinds, strict=True):
                assert early[run] + later[run] == amount[k, :, s].sum()
                assert early[run] <= amount[k, 0, s]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 4), st.booleans())
@example(99999, 2, 3, True)  # fits only where the second stage alone recomputes
def test_an_order_is_cut_in_a_way_that_fits_and_takes_what_is_said(
    seed: int, operators: int, devices: int, memory: bool
) -> None:
    problem = random_problem(seed, operators, devices, memory=memory, recompute=False)
    best, blocks = brute_force(problem, [problem.fleet.names]), Blocks(problem)
    found = cut_orders(problem, network_of(problem), blocks, [tuple(range(devices))])
    if found and problem.schedule == "gpipe":
        placed = place(problem, problem.fleet.names, blocks.boundaries(found[0].stages.ends[1:-1]))
        assert fits(placed)
        assert placed.times.step_s(problem.micro_batches) == pytest.approx(found[0].step_s, rel=1e-8)
        assert found[0].step_s >= best * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 4))
def test_an_order_whose_values_skip_no_stage_is_cut_best_for_one_micro_batch(
    seed: int, operators: int, devices: int
) -> None:
    """The least time there and back, for which no limit on the period is needed."""
    rng = random.Random(seed)
    names = ["x", *(f"op{k}" for k in range(operators - 1)), "loss"]
    sizes = [rng.randint(1, 40) for _ in names]
    chained = [
        operator(name, before, flops=rng.randint(1, 50), outputs=(tensor(size, batched=name != "loss"),))
        for before, name, size in zip(names, names[1:], sizes, strict=False)
    ]
    graph = OpGraph(name="line", mode="train", loss=Ref("loss"), ops=(placeholder("x", 4), *chained))
    speeds = [rng.uniform(5, 50) for _ in range(devices)]
    problem = problem_of(graph, fleet_of(speeds, seed), micro_batches=1)
    found = cut_orders(problem, network_of(problem), Blocks(problem), [tuple(range(devices))])
    best = brute_force(problem, [problem.fleet.names])
    assert min((cut.step_s for cut in found), default=INFINITE) == pytest.approx(best, rel=1e-8)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 4))
def test_every_order_and_subset_is_searched_as_by_brute_force(seed: int, operators: int, devices: int) -> None:
    problem = random_problem(seed, operators, devices, memory=False, recompute=False)
    best = brute_force(problem, all_orders_of(problem.fleet))
    assert plan("chain", problem).predicted.step_s == pytest.approx(best, rel=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 4))
def test_a_row_of_the_arrays_is_the_closed_form_of_the_stage_graphs(seed: int, operators: int, devices: int) -> None:
    problem = random_problem(seed, operators, devices, memory=seed % 2 == 0)
    blocks = Blocks(problem)
    if blocks.count < devices:
        return
    cut = sorted(random.Random(seed).sample(range(1, blocks.count), devices - 1))
    table = cut_table(blocks, np.array([(0, *cut, blocks.count)]))
    row = timed(problem, network_of(problem), Trials(table, np.zeros(1, dtype=np.int64), np.arange(devices)[None]))
    placed = place(problem, problem.fleet.names, blocks.boundaries(cut))
    times, sizes = placed.times, placed.sizes
    assert row.busy_s[0] == pytest.approx(times.bottleneck[0])
    assert row.fill_s[0] == pytest.approx(times.fill_s + times.shared_s)
    memory = [size.memory(1).total for size in sizes]
    assert memory == (table.fixed_bytes + table.saved_bytes + table.received_bytes)[0].tolist()
    returned = table.shared_gradient[0].sum(axis=1)
    needs = [stage_bytes(blocks, a, [b], 1)[0] for a, b in itertools.pairwise((0, *cut, blocks.count))]
    assert (needs + returned).tolist() == memory
    room = {name: max(1, size) for name, size in zip(problem.fleet.names, memory, strict=True)}
    if any(problem.offered_bytes(name) < size for name, size in room.items()):
        return  # it holds none
    tight = dataclasses.replace(problem, fleet=with_memory(problem.fleet, room))
    held = timed(tight, network_of(tight), Trials(table, np.zeros(1, dtype=np.int64), np.arange(devices)[None]))
    assert held.held[0].min() >= 1
    if problem.schedule == "1f1b" and (held.held[0] < problem.micro_batches).any():
        assert held.round_trip_s[0] == pytest.approx(times.round_trips_s)


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


def test_a_gpt_on_unequal_devices_beats_even() -> None:
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
    problem = problem_of(gpt_graph(4), fleet, micro_batches=64)
    made = plan("chain", problem, partial(simulated_s, problem, steps=3))
    regions = [fleet.device(s.device).region for s in made.stages]
    assert len(regions) > 4
    assert sum(a != b for a, b in itertools.pairwise(regions)) == 1
    by_formula = plan("chain", problem)  # which hides latency, and crosses twice
    assert simulated_s(problem, made) < 0.95 * simulated_s(problem, by_formula)
    assert simulated_s(problem, by_formula) < simulated_s(problem, plan("even", problem))


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


@pytest.mark.parametrize("planner", ["chain", "auto"])
def test_a_data_holder_that_holds_no_first_stage_is_named(planner: str) -> None:
    held = Constraints(data_holders=("d0",))
    fleet = fleet_of([1.0, 1.0], memory=[152, 1392])
    problem = problem_of(random_graph(520604, 2), fleet, recompute=False, constraints=held)
    with pytest.raises(FleetTooSmall, match=r"stage 0 on device d0 needs 180 B .* offers 152 B: 28 B short"):
        plan(planner, problem)


def test_even_refuses_what_does_not_fit() -> None:
    problem = problem_of(gpt_graph(1), _fleet([1e9, 1e9], memory=1 << 10), state=parameter_state("adamw"))
    with pytest.raises(FleetTooSmall, match=r"stage 0 on device d0 needs .* short"):
        plan("even", problem)


def test_a_plan_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = plan("chain", problem_of(gpt_graph(1), _fleet([1e9, 2e9])))
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made
