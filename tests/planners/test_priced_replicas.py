"""Prices of devices bound several replicas: never above the best plan by brute force, and above the simplest bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import inf

import pytest
from plan_cases import fleet_of, gpt_graph, operator, parameter, placeholder, problem_of, random_graph, tensor
from test_relaxed_bounds import ALL, STEP, small_problem
from test_verify import question_of

from isthmus.cost import Problem
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.graph.opgraph import OpGraph, Ref
from isthmus.verification.bound import Bounds
from isthmus.verification.device_sets import DeviceKinds
from isthmus.verification.prover import PricedReplicas
from isthmus.verification.reading import GraphReading
from isthmus.verification.search import OutOfWork, PlanSearch, _Ending, _Scope  # pyright: ignore[reportPrivateUsage]
from isthmus.verification.stage_arrays import stage_arrays
from isthmus.verification.walks import Walks, ample_bytes

pytestmark = pytest.mark.thorough


def priced(problem: Problem, goal_s: float) -> PricedReplicas:
    reading = GraphReading(question_of(problem))
    arrays, count = stage_arrays(reading), problem.micro_batches
    kinds = DeviceKinds(reading.question, ample_bytes(arrays, count))
    return PricedReplicas(Walks(arrays, kinds, reading.question), count, goal_s)


class SoMany(PlanSearch):
    """Of one number of replicas."""

    replicas = 2

    def _groupings(self, ends: dict[frozenset[str], list[_Ending]], scope: _Scope) -> Iterator[list[frozenset[str]]]:
        return (groups for groups in super()._groupings(ends, scope) if len(groups) == self.replicas)


@pytest.mark.parametrize("seed", range(0, ALL, STEP))
def test_no_bound_is_above_the_best_plan(seed: int) -> None:
    """Of each number of replicas, and of all of them."""
    problem = small_problem(seed)
    most, reading = min(len(problem.fleet.names), problem.micro_batches), GraphReading(question_of(problem))
    best_s = dict[int, float]()
    for n in range(2, most + 1):
        search = SoMany(reading, priced=False)
        search.replicas = n
        try:
            best_s[n] = search.several(1e12).known
        except OutOfWork:
            pytest.skip("more plans than brute force tries")
    if min(best_s.values(), default=inf) == inf:
        return
    goal_s = 2 * max(seconds for seconds in best_s.values() if seconds < inf)
    found = priced(problem, goal_s)
    for n, seconds in best_s.items():
        assert found.raised((n, n), goal_s, lambda: False)[0] <= seconds * (1 + 1e-9)
    assert found.raised((2, most), goal_s, lambda: False)[0] <= min(best_s.values()) * (1 + 1e-9)


def test_a_check_tries_the_prices_that_a_planner_tried() -> None:
    """Whatever is to be proven: what was proven once is proven again with itself as the goal."""
    speeds = [1e5, 1e5] + [1e4 * (1 + k / 100) for k in range(6)]
    problem = problem_of(random_graph(3, 4), fleet_of(speeds, 1), micro_batches=16)
    for replicas in ((2, 2), (4, 4), (5, 8)):
        proven_s, _ = priced(problem, 1e9).raised(replicas, 1e9, lambda: False)
        again_s, _ = priced(problem, proven_s).raised(replicas, proven_s, lambda: False)
        assert again_s == proven_s


def test_it_ends_when_it_is_asked_to() -> None:
    problem = problem_of(random_graph(3, 6), fleet_of([1e4 * (1 + k / 100) for k in range(8)], 1), micro_batches=16)
    asked: list[bool] = []

    def ended() -> bool:
        asked.append(True)
        return len(asked) > 3

    least_s, more = priced(problem, 1e9).raised((2, 2), 1e9, ended)
    assert (least_s, more, len(asked)) == (-inf, True, 4)


def test_one_fast_pair_is_no_pair_for_every_replica() -> None:
    """Two devices are ten times as fast as six others: replicas cannot share them. Prices say so."""
    speeds = [1e5, 1e5] + [1e4 * (1 + k / 100) for k in range(6)]
    problem = problem_of(random_graph(3, 4), fleet_of(speeds, 1), micro_batches=16)
    together_s = 16 * Bounds(GraphReading(question_of(problem))).work / sum(speeds)
    bound_s, more = priced(problem, 1e9).raised((4, 4), 1e9, lambda: False)
    assert bound_s > 1.05 * together_s
    assert not more


def test_some_replica_has_its_share_rounded_up() -> None:
    """Five micro-batches, four alike devices: two of them on one, however the rest is shared."""
    devices = tuple(Device(name=f"d{k}", region="a", flops_per_s=1e4, memory_bytes=1 << 40) for k in range(4))
    fleet = Fleet(name="alike", devices=devices, links=Links(default=Link(1e3, 1e3)))
    problem = problem_of(random_graph(3, 4), fleet, micro_batches=5)
    alone_s = Bounds(GraphReading(question_of(problem))).work / 1e4
    bound_s, _ = priced(problem, 1e9).raised((4, 4), 1e9, lambda: False)
    assert bound_s >= (2 - 0.15) * alone_s


def test_what_comes_from_two_stages_comes_over_two_links_at_once() -> None:
    """`op1` sends 50 elements to `op2` and 50 to `loss`, which takes 50 of `op2` too: no link carries 100. Memory asks
    for three stages, and one of the devices is far away."""
    ops = [placeholder("tokens", 4), *(parameter(f"w{k}", 1000) for k in range(3))]
    two = tensor(50), tensor(50)
    ops.append(operator("op1", "tokens", "w0", flops=1000, saved=100, outputs=two, requires_grad=(True, True)))
    ops.append(operator("op2", Ref("op1", 0), Ref("op1", 1), "w1", flops=1000, saved=100, outputs=(tensor(50),)))
    loss = (tensor(batched=False),)
    ops.append(operator("loss", Ref("op1", 0), Ref("op2"), "w2", flops=1000, saved=100, outputs=loss))
    graph = OpGraph(name="skip", mode="train", ops=tuple(ops), loss=Ref("loss"))
    rooms = {"d0": 11000, "d1": 11000, "d2": 11000, "d3": 1000}
    devices = tuple(Device(name=n, region="a", flops_per_s=1e9, memory_bytes=room) for n, room in rooms.items())
    far, near = Link(0.0, 100.0), Link(0.0, 1e9)
    routes = tuple(Route(a, b, far if "d2" in (a, b) else near) for a, b in itertools.permutations(rooms, 2))
    fleet = Fleet(name="far", devices=devices, links=Links(devices=routes))
    problem = problem_of(graph, fleet, micro_batches=20, recompute=False)
    best_s = PlanSearch(GraphReading(question_of(problem)), priced=False).single(1e12).known
    bound_s = Bounds(GraphReading(question_of(problem))).single_s()
    assert 0.9 * best_s < bound_s <= best_s * (1 + 1e-9)


def test_memory_says_how_many_islands_a_pipeline_crosses() -> None:
    """Two sites of two devices, of which each pair holds half the model: the slow link is crossed."""
    problem = problem_of(gpt_graph(1, tied=False), fleet_of([1e4] * 4, 1), micro_batches=4)
    need = Bounds(GraphReading(question_of(problem))).need_bytes
    fast, slow = Link(1e-6, 1e9), Link(1e6, 1e9)
    routes = tuple(Route(a, b, fast if a == b else slow) for a in "ab" for b in "ab")

    def single_s(room: int) -> float:
        devices = tuple(Device(name=f"d{k}", region="ab"[k // 2], flops_per_s=1e4, memory_bytes=room) for k in range(4))
        fleet = Fleet(name="sites", devices=devices, links=Links(regions=routes))
        asked = question_of(problem_of(gpt_graph(1, tied=False), fleet, micro_batches=4))
        return Bounds(GraphReading(asked)).single_s()

    assert single_s(int(0.6 * need)) < 1e6 <= single_s(int(0.4 * need))
