"""Chains of devices that serve a model: the search against every chain and every cut, and a closed form by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.graph.opgraph import Affine
from isthmus.planners.generation import FRAME_BYTES, Chain, ServingProblem, chain_of_plan, plan_chain

WIDTH = 16
LAYERS = 5


def model() -> OpGraph:
    """Layers of a weight and an operator, each of other cost; all that crosses is one value of `WIDTH` numbers."""
    hidden = TensorSpec("float32", (1, Affine(1), WIDTH), (Affine(WIDTH), WIDTH, 1))
    ops = [Op(name="x", kind="placeholder", target="input_ids", outputs=(hidden,), requires_grad=(False,))]
    before = "x"
    for n in range(LAYERS):
        weight = TensorSpec("float32", (n + 1, 1000), (1000, 1))
        ops.append(Op(name=f"w{n}", kind="parameter", target=f"w{n}", outputs=(weight,), requires_grad=(False,)))
        ops.append(
            Op(
                name=f"y{n}",
                kind="operator",
                target="aten.linear.default",
                args=(Ref(before), Ref(f"w{n}")),
                outputs=(hidden,),
                requires_grad=(False,),
                flops_forward=Affine(1_000_000 * (n % 3 + 1)),
            )
        )
        before = f"y{n}"
    return OpGraph(name="layers", mode="eval", ops=tuple(ops), loss=Ref(before))


def fleet_of(seed: int, count: int = 3, memory_bytes: tuple[int, ...] = (1 << 20,)) -> Fleet:
    draw = random.Random(seed)
    devices = tuple(
        Device(
            name=f"d{i}",
            region="here",
            flops_per_s=draw.choice([1e8, 3e8, 1e9]),
            memory_bytes=draw.choice(memory_bytes),
        )
        for i in range(count)
    )
    return Fleet(name="drawn", devices=devices, links=Links(default=Link(draw.choice([1e-4, 2e-3, 0.05]), 1e7)))


def problem_of(fleet: Fleet, at_once: int = 4) -> ServingProblem:
    return ServingProblem(Flow(model()), fleet, context=8, at_once=at_once)


def every_chain(problem: ServingProblem) -> list[Chain]:
    end, names = len(problem.flow.operators), problem.fleet.names
    found: list[Chain] = []
    for count in range(1, len(names) + 1):
        for devices in itertools.permutations(names, count):
            for cut in itertools.combinations(range(1, end), count - 1):
                edges = [0, *cut, end]
                stages = zip(devices, edges, edges[1:], strict=False)
                if all(problem.memory_bytes(a, b) <= problem.fleet.device(d).memory_bytes for d, a, b in stages):
                    found.append(problem.priced(devices, cut))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_least_latency_is_that_of_every_chain(seed: int) -> None:
    problem = problem_of(fleet_of(seed, memory_bytes=(30_000, 45_000, 1 << 20)))
    every = every_chain(problem)
    if not every:
        with pytest.raises(FleetTooSmall, match="no chain of devices has the memory"):
            plan_chain(problem, "latency")
        return
    assert plan_chain(problem, "latency").token_s == pytest.approx(min(chain.token_s for chain in every))


@pytest.mark.parametrize("seed", range(12))
def test_throughput_is_near_that_of_every_chain(seed: int) -> None:
    """The limits that are tried lie a little apart."""
    problem = problem_of(fleet_of(seed), at_once=16)
    best = max(chain.tokens_per_s for chain in every_chain(problem))
    assert 0.85 * best <= plan_chain(problem, "throughput").tokens_per_s <= best * (1 + 1e-9)


def test_a_price_by_hand() -> None:
    fleet = fleet_of(0)
    problem = problem_of(fleet, at_once=2)
    chain = problem.priced(("d0", "d1"), (2,))
    speeds = [fleet.device(name).sustained_flops_per_s for name in chain.devices]
    link = fleet.link("d0", "d1")
    compute = [3_000_000 / speeds[0], (3_000_000 + 1_000_000 + 2_000_000) / speeds[1]]
    there = link.latency_s + (4 * WIDTH + FRAME_BYTES) / link.bandwidth_bytes_per_s
    back = link.latency_s + FRAME_BYTES / link.bandwidth_bytes_per_s
    assert chain.token_s == pytest.approx(sum(compute) + there + back)
    assert chain.tokens_per_s == pytest.approx(2 / max(chain.token_s, 2 * max(compute)))


def test_many_requests_are_worth_more_devices_than_one() -> None:
    devices = tuple(Device(name=f"d{i}", region="here", flops_per_s=1e8, memory_bytes=1 << 20) for i in range(4))
    problem = problem_of(Fleet(name="equal", devices=devices, links=Links(default=Link(0.01, 1e9))), at_once=32)
    assert len(plan_chain(problem, "latency").devices) == 1
    # A layer of 3 MFLOP is the slowest stage at best: three devices reach it.
    assert len(plan_chain(problem, "throughput").devices) == 3


def test_a_training_plan_becomes_a_chain() -> None:
    problem = problem_of(fleet_of(0))
    chain = chain_of_plan(problem, ["d0", "d1", "d2"], [0, 0, 2, 0, 2])
    assert (chain.devices, chain.boundaries) == (("d0", "d2"), (2,))


def test_two_stages_on_one_device_are_refused() -> None:
    with pytest.raises(UserError, match="several stages on one device"):
        chain_of_plan(problem_of(fleet_of(0)), ["d0", "d1", "d0"], [0, 1, 1, 2, 2])


def test_a_training_plan_without_memory_for_the_caches_is_refused() -> None:
    problem = problem_of(fleet_of(0, memory_bytes=(10_000,)))
    with pytest.raises(FleetTooSmall, match=r"device d1: weights .* caches of 4 requests"):
        chain_of_plan(problem, ["d0", "d1"], [0, 1, 1, 1, 1])
