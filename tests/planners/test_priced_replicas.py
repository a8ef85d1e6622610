"""Prices of devices bound several replicas: never above the best plan by brute force, and above the simplest bound."""

from __future__ import annotations

from math import inf

import pytest
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph
from test_relaxed_bounds import ALL, STEP, small_problem
from test_verify import question_of

from isthmus.cost import Problem
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.verification.bound import Bounds
from isthmus.verification.device_sets import DeviceKinds
from isthmus.verification.priced_replicas import PricedReplicas
from isthmus.verification.reading import GraphReading
from isthmus.verification.search import OutOfWork, PlanSearch
from isthmus.verification.stage_arrays import stage_arrays
from isthmus.verification.walks import Walks, ample_bytes


def priced(problem: Problem, goal_s: float) -> PricedReplicas:
    reading = GraphReading(question_of(problem))
    arrays, count = stage_arrays(reading), problem.micro_batches
    kinds = DeviceKinds(reading.question, ample_bytes(arrays, count))
    return PricedReplicas(Walks(arrays, kinds, reading.question), count, goal_s)


@pytest.mark.parametrize("seed", range(0, ALL, STEP))
def test_no_bound_is_above_the_best_plan(seed: int) -> None:
    problem = small_problem(seed)
    if problem.micro_batches < 2 or len(problem.fleet.names) < 2:
        return
    try:
        best_s = PlanSearch(GraphReading(question_of(problem)), priced=False).several(1e12).known
    except OutOfWork:
        pytest.skip("more plans than brute force tries")
    if best_s == inf:
        return
    most, goal_s = min(len(problem.fleet.names), problem.micro_batches), 2 * best_s
    found = priced(problem, goal_s)
    bounds = [found.raised((n, n), goal_s, lambda: False)[0] for n in range(2, most + 1)]
    assert min(bounds) <= best_s * (1 + 1e-9)
    assert found.raised((2, most), goal_s, lambda: False)[0] <= best_s * (1 + 1e-9)


def test_one_fast_pair_is_no_pair_for_every_replica() -> None:
    """Two devices are ten times as fast as six others: replicas cannot share them. Prices say so."""
    speeds = [1e5, 1e5] + [1e4 * (1 + k / 100) for k in range(6)]
    problem = problem_of(random_graph(3, 4), fleet_of(speeds, 1), micro_batches=16)
    calls = iter([False, True])
    found = priced(problem, 1e9)
    free_s, more = found.raised((4, 4), 1e9, lambda: next(calls))
    assert more
    raised_s, more = found.raised((4, 4), 1e9, lambda: False)
    assert not more
    assert raised_s > 1.3 * free_s


def test_some_replica_has_its_share_rounded_up() -> None:
    """Five micro-batches, four alike devices: two of them on one, however the rest is shared."""
    devices = tuple(Device(name=f"d{k}", region="a", flops_per_s=1e4, memory_bytes=1 << 40) for k in range(4))
    fleet = Fleet(name="alike", devices=devices, links=Links(default=Link(1e3, 1e3)))
    problem = problem_of(random_graph(3, 4), fleet, micro_batches=5)
    alone_s = Bounds(GraphReading(question_of(problem))).work / 1e4
    bound_s, _ = priced(problem, 1e9).raised((4, 4), 1e9, lambda: False)
    assert bound_s >= (2 - 0.15) * alone_s


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
