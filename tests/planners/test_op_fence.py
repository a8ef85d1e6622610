"""OP-Fence: communities, the way through them, the balanced cut, and what is done where memory is short."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, operator, parameter, placeholder, problem_of, random_graph, tensor

from isthmus.cost import Problem, place
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import network_of
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links, Route, built_in_fleet
from isthmus.graph import OpGraph, Ref
from isthmus.planners import plan
from isthmus.planners.baselines.op_fence import balanced, communities, visiting_order
from isthmus.planners.search.orders import scorer_of
from isthmus.plans import Plan


def islands(sizes: Sequence[int], *, neighbour: Link, far: Link, memory: int = 1 << 40) -> Fleet:
    """Islands in a line: fast inside, `neighbour` between those side by side. Devices are declared in turn."""
    names = [[f"i{k}-{n}" for n in range(size)] for k, size in enumerate(sizes)]
    turn = [name for group in itertools.zip_longest(*names) for name in group if name]
    devices = tuple(
        Device(name=n, region=f"r{n[1]}", flops_per_s=1.0 + len(n) + int(n[-1]), memory_bytes=memory) for n in turn
    )
    routes = tuple(
        Route(f"r{a}", f"r{b}", neighbour if abs(a - b) == 1 else far)
        for a, b in itertools.permutations(range(len(sizes)), 2)
    )
    return Fleet(name="islands", devices=devices, links=Links(intra=Link(0.0, 1e4), regions=routes))


SLOW, SLOWEST = Link(0.1, 100.0), Link(0.5, 10.0)


def groups_of(made: Plan, fleet: Fleet) -> list[str]:
    """The regions in the order in which the pipeline enters them."""
    return [region for region, _ in itertools.groupby(fleet.device(s.device).region for s in made.stages)]


def test_communities_are_the_islands_and_are_visited_along_the_line() -> None:
    fleet = islands([3, 2, 4, 2], neighbour=SLOW, far=SLOWEST)
    problem = problem_of(random_graph(5, 40), fleet)
    found = [{fleet.devices[d].region for d in members} for members in communities(network_of(problem))]
    assert sorted(map(sorted, found)) == [["r0"], ["r1"], ["r2"], ["r3"]]
    assert groups_of(plan("op-fence", problem), fleet) in (["r0", "r1", "r2", "r3"], ["r3", "r2", "r1", "r0"])


def test_the_mean_of_both_directions_counts() -> None:
    names = "abcd"
    fast = {("a", "b"), ("c", "d")}  # one way only
    routes = tuple(
        Route(x, y, Link(0.0, 1000.0 if (x, y) in fast else 1.0)) for x, y in itertools.permutations(names, 2)
    )
    devices = tuple(Device(name=n, region="r", flops_per_s=1.0, memory_bytes=1) for n in names)
    fleet = Fleet(name="one way", devices=devices, links=Links(devices=routes))
    assert communities(network_of(problem_of(random_graph(1, 3), fleet))) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("name", ["fusionllm-testbed1", "fusionllm-testbed2"])
def test_each_community_is_visited_once_and_tears_no_machine_apart(name: str) -> None:
    fleet = built_in_fleet(name)
    problem = problem_of(random_graph(7, 120), fleet)
    home: dict[str, int] = {}
    for number, members in enumerate(communities(network_of(problem))):
        here = {fleet.devices[d].region for d in members}
        assert len(members) == sum(device.region in here for device in fleet.devices)
        home |= {fleet.names[d]: number for d in members}
    made = plan("op-fence", problem)
    assert made == plan("op-fence", problem)
    visited = [number for number, _ in itertools.groupby(home[s.device] for s in made.stages)]
    assert sorted(visited) == sorted(set(home.values()))


@given(st.integers(0, 10_000), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_no_reversal_inside_a_community_shortens_the_way(seed: int, sizes: list[int]) -> None:
    count, rng = sum(sizes), np.random.default_rng(seed)
    pair_s = rng.uniform(1, 10, (count, count))
    ends = list(itertools.accumulate(sizes, initial=0))
    groups = [tuple(range(a, b)) for a, b in itertools.pairwise(ends)]
    found = visiting_order(pair_s, groups)
    assert sorted(map(sorted, found)) == [list(g) for g in groups]

    def length(order: list[tuple[int, ...]]) -> float:
        both = pair_s + pair_s.T
        return sum(both[a, b] for a, b in itertools.pairwise(itertools.chain.from_iterable(order)))

    for k, members in enumerate(found):
        for i, j in itertools.combinations(range(len(members)), 2):
            turned = (*members[:i], *members[i : j + 1][::-1], *members[j + 1 :])
            assert length(found) <= length([*found[:k], turned, *found[k + 1 :]]) + 1e-6


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(0, 999),
    st.booleans(),
)
def test_the_cut_weighs_shares_by_speed_against_what_crosses(
    blocks: list[int], speeds: list[int], seed: int, weigh: bool
) -> None:
    """A slow transcription; both must agree on the cost of what they choose, as ties may fall either way."""
    work = np.array(list(itertools.accumulate(blocks, initial=0)), dtype=np.float64)
    count, used = len(blocks), speeds
    crossing_s = np.random.default_rng(seed).uniform(0, 5, (len(speeds), count + 1))
    bounds = [0, *balanced(work, speeds, crossing_s if weigh else None), count]
    assert len(bounds) == len(used) + 1
    shares = [work[-1] * sum(used[:k]) / sum(used) for k in range(len(used) + 1)]
    for k in range(1, len(used)):
        allowed = range(bounds[k - 1], count + 1)
        assert bounds[k] in allowed
        low = min((shares[k - 1] + shares[k]) / 2, max((work[b] for b in allowed if work[b] <= shares[k]), default=0))
        high = max((shares[k] + shares[k + 1]) / 2, min((work[b] for b in allowed if work[b] >= shares[k]), default=0))
        near = [b for b in allowed if low - 1e-9 <= work[b] <= high + 1e-9]

        def cost(b: int, k: int = k) -> float:
            if not weigh:
                return abs(work[b] - shares[k])
            slower = used[k - 1] if work[b] > shares[k] else used[k]  # who computes what was moved
            return abs(work[b] - shares[k]) / slower + crossing_s[k - 1, b]

        assert cost(bounds[k]) <= min(map(cost, near if weigh else allowed)) + 1e-6


def chain_graph(seed: int, operators: int) -> OpGraph:
    """Values all alike, so that what a stage needs falls as its start moves on."""
    rng = random.Random(seed)
    ops = [placeholder("x", 1)]
    for k in range(operators):
        before = f"op{k - 1}" if k else "x"
        ops += [
            parameter(f"w{k}", rng.randint(1, 30)),
            operator(f"op{k}", before, f"w{k}", flops=rng.randint(1, 20), saved=rng.randint(8, 30)),
        ]
    ops.append(operator("loss", f"op{operators - 1}", flops=1, saved=8, outputs=(tensor(batched=False),)))
    return OpGraph(name="chain", mode="train", ops=tuple(ops), loss=Ref("loss"))


def least_compute_s(problem: Problem, order: Sequence[str], held: int) -> float:
    """By brute force: over all cuts for the devices in this order, any of them left out."""
    best, count = float("inf"), len(problem.flow.operators)
    for size in range(1, len(order) + 1):
        for names in itertools.combinations(order, size):
            for boundaries in itertools.combinations(range(1, count), size - 1):
                placed = place(problem, names, boundaries)
                if all(
                    size.memory(held).total <= problem.fleet.device(n).memory_bytes
                    for size, n in zip(placed.sizes, names, strict=True)
                ):
                    best = min(best, max(placed.times.compute_s))
    return best


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(3, 6), st.floats(0.35, 1.1))
def test_where_memory_is_short_devices_are_filled_evenly(seed: int, operators: int, room: float) -> None:
    rng = random.Random(seed)
    graph = chain_graph(seed, operators)
    whole = problem_of(graph, fleet_of([1.0]), micro_batches=1)
    need = place(whole, ["d0"], []).sizes[0].memory(1).total
    memory = [int(need * room * rng.uniform(0.3, 1)) for _ in range(3)]
    problem = problem_of(graph, fleet_of([1.0, 2.0, 4.0], seed, memory=memory), micro_batches=1)
    roomy = plan("op-fence", problem_of(graph, fleet_of([1.0, 2.0, 4.0], seed), micro_batches=1))
    network = network_of(problem)
    groups = visiting_order(scorer_of(problem, network, Blocks(problem)).pair_s, communities(network))
    best_s = least_compute_s(problem, [problem.fleet.names[d] for group in groups for d in group], 1)
    try:
        made = plan("op-fence", problem)
    except FleetTooSmall:
        assert best_s == float("inf")
        return
    for stage in made.stages:
        assert stage.memory.total <= problem.fleet.device(stage.device).memory_bytes
    if best_s < float("inf") and (made.devices, made.boundaries()) != (roomy.devices, roomy.boundaries()):
        assert max(place(problem, made.devices, made.boundaries()).times.compute_s) == pytest.approx(best_s)


def test_a_model_that_nothing_holds_is_refused() -> None:
    problem = problem_of(random_graph(3, 12), fleet_of([1.0, 1.0], memory=[40, 40]))
    with pytest.raises(FleetTooSmall, match=r"does not fit fleet 'hand'.*short"):
        plan("op-fence", problem)


def test_with_more_devices_than_places_the_last_are_left_out() -> None:
    problem = problem_of(random_graph(3, 2), fleet_of([1.0] * 6))
    made = plan("op-fence", problem)
    assert len(made.stages) < 6
    assert made.planner == "op-fence"
    assert any(note.endswith("in community 1 of 1") for note in made.notes)
    assert sum("is left out: no place to cut" in note for note in made.notes) == 6 - len(made.stages)
