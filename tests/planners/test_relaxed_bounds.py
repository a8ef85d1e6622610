"""The relaxation's bounds are bounds: of one replica and of several, none is above the best plan by brute force.

Goals are above the best plan, so that a bound that is none would show. `make test` looks at a few of 500 problems.
"""

from __future__ import annotations

import bisect
import itertools
import random
from math import inf

import msgspec
import numpy as np
import pytest
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph, saving
from test_verify import question_of, two_sites
from tests.tiers import THOROUGH

from isthmus.cost import Problem
from isthmus.cost.sync import fastest, sync_s
from isthmus.errors import FleetTooSmall
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.planners import LeastBound, plan
from isthmus.planners.bounds import with_certificate
from isthmus.plans import ReplicaSync, SyncGroup
from isthmus.verification import Prover, prover, several_replicas, verify
from isthmus.verification.device_sets import DeviceKinds, Tracked
from isthmus.verification.disjoint_sets import CutsNeeded, DisjointSets, most_of_sizes
from isthmus.verification.pipelines import Goal
from isthmus.verification.prover import BoundParts
from isthmus.verification.reading import GraphReading
from isthmus.verification.search import OutOfWork, PlanSearch
from isthmus.verification.sum_limits import PairSummed, SumLimits

pytestmark = pytest.mark.thorough

ALL = 500
STEP = 1 if THOROUGH else 25
WORK = 1e7


def small_problem(seed: int) -> Problem:
    """Skips, shared and frozen parameters, integers; short memory, recomputation; uplinks; links that differ or not."""
    draw = random.Random(f"bounds {seed}")
    devices, units, count = draw.randint(2, 4), draw.randint(2, 5), draw.choice([1, 2, 3, 5, 9])
    memory = [draw.randint(150, 3000) for _ in range(devices)] if seed % 2 else None
    speeds = [draw.choice([10.0, 20.0, draw.uniform(5, 50)]) for _ in range(devices)]
    fleet = fleet_of(speeds, seed, memory=memory)
    if seed % 5 == 0:
        fleet = two_sites(draw.uniform(5, 500), seed)
    elif seed % 3 == 0:
        alike = Links(default=Link(draw.choice([0.0, 0.2]), draw.uniform(5, 500)))
        fleet = Fleet(name="alike", devices=fleet.devices, links=alike)
    graph = saving(random_graph(seed, units), draw.choice([1, 9]))
    schedule = draw.choice(["1f1b", "1f1b", "gpipe"])
    return problem_of(graph, fleet, micro_batches=count, schedule=schedule, recompute=seed % 4 > 0)


@pytest.mark.parametrize("seed", range(0, ALL, STEP))
def test_no_bound_is_above_the_best_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, and once as if there were too many sets of devices to look at each."""
    problem = small_problem(seed)
    reading = GraphReading(question_of(problem))
    search = PlanSearch(reading, priced=False)
    try:
        single_s, several_s = search.single(1e12).known, search.several(1e12).known
    except OutOfWork:
        pytest.skip("more plans than brute force tries")
    best_s = min(single_s, several_s)
    if best_s == inf:
        return
    for most_states in (several_replicas.ALL_STATES, 0):
        monkeypatch.setattr(several_replicas, "ALL_STATES", most_states)
        monkeypatch.setattr(prover, "MOST_SETS", 4)
        parts = BoundParts(reading, Goal(1.4 * best_s))
        for part in parts.all:
            while not part.stuck and part.bound_s < 1.4 * best_s and parts.work < WORK:
                part.advance(lambda parts=parts: parts.work > WORK)
        assert parts.single.bound_s <= single_s * (1 + 1e-9)
        assert parts.several_s <= several_s * (1 + 1e-9)
    assert Prover(question_of(problem), 1.4 * best_s).run(lambda work: work > WORK) <= best_s * (1 + 1e-9)


def test_one_replica_is_proven_to_the_last_digit_where_values_cross_one_boundary() -> None:
    """Held and Karp's programme over three devices proves what `chain` finds, to rounding."""
    fleet = fleet_of([2e4, 3e4, 5e4], 4)
    problem = problem_of(gpt_graph(1, tied=False), fleet, micro_batches=4)
    found = plan("chain", problem)
    goal_s = found.predicted.step_s
    parts = BoundParts(GraphReading(question_of(problem)), Goal(goal_s))
    parts.single.advance(lambda: False)
    assert parts.single.bound_s >= 0.98 * goal_s


def test_devices_that_are_alike_are_one_kind() -> None:
    """Twelve devices of two kinds have (6 + 1) (6 + 1) sets, not 2^12."""
    devices = tuple(
        Device(name=f"d{k}", region="ab"[k % 2], flops_per_s=2e6 * (1 + k % 2), memory_bytes=1 << 40) for k in range(12)
    )
    fleet = Fleet(name="twelve", devices=devices, links=Links(default=Link(0.01, 1e6)))
    question = question_of(problem_of(random_graph(1, 4), fleet))
    kinds = DeviceKinds(question, 1 << 30)
    assert [len(kind.names) for kind in kinds.all] == [6, 6]
    assert Tracked(kinds, (0, 1)).size == 49


def test_many_unlike_devices_have_a_bound() -> None:
    """Of 40 kinds there are 2^40 sets: only some are counted."""
    fleet = fleet_of([1e4 * (1 + k / 40) for k in range(40)], 40)
    question = question_of(problem_of(random_graph(1, 4), fleet, micro_batches=4))
    simple = min(part.bound_s for part in BoundParts(GraphReading(question), Goal(1e12)).all)
    assert Prover(question, 1e12).run(lambda work: work > WORK) >= simple * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_replicas_have_the_cuts_that_their_sums_need(seed: int) -> None:
    """Random cuts, whose sums take some time: then that time needs no more cuts than there are."""
    draw = random.Random(seed)
    replicas, count = draw.randint(2, 8), draw.randint(2, 9)
    blocks = [4 * draw.choice([0, 5, 200, draw.randint(1, 400)]) for _ in range(count)]
    often = draw.choice([0.1, 0.5, 0.9])
    cuts = [[place for place in range(1, count) if draw.random() < often] for _ in range(replicas)]
    sizes = [1 + len(own) for own in cuts]
    fleet = fleet_of([1.0] * sum(sizes), seed)
    if seed % 3:
        far = Link(draw.choice([0.0, 0.1]), draw.uniform(5, 500))
        regions = Links(intra=Link(0.0, 5000.0), default=far) if seed % 3 == 1 else Links(default=far)
        sites = tuple(msgspec.structs.replace(d, region="abcdefgh"[draw.randrange(8)]) for d in fleet.devices)
        fleet = Fleet(name="sites", devices=sites, links=regions)
    starts = [sum(sizes[:r]) for r in range(replicas)]
    period = draw.choice([1, 1, 3])
    groups = dict[tuple[tuple[str, ...], int], int]()
    for block, size_bytes in enumerate(blocks):
        held = [starts[r] + bisect.bisect_right(cuts[r], block) for r in range(replicas)]
        for part in (size_bytes // 8 * 4, size_bytes - size_bytes // 8 * 4):
            key = tuple(fleet.names[d] for d in held), draw.randrange(period)
            groups[key] = groups.get(key, 0) + part
    summed = tuple(
        fastest(fleet, SyncGroup(devices=members, parameters=(), iterations=(step,), size_bytes=size_bytes))
        for (members, step), size_bytes in groups.items()
    )
    seconds = period * sync_s(fleet, ReplicaSync(groups=summed, period=period)) * (1 + 1e-9)
    limits = SumLimits(fleet, [[name] for name in fleet.names], period)
    for pair in limits.pairs(seconds, replicas):
        assert pair.cuts(np.array(blocks, dtype=np.float64), replicas).allow(sizes)
    for group in summed:
        homes = limits.homes(seconds, replicas, replicas, group.size_bytes)
        assert any({fleet.names.index(name) for name in group.devices} <= set(home) for home in homes)


def test_alike_replicas_need_a_cut_in_each_interval() -> None:
    """Three replicas of six blocks of 400 bytes: where a link carries 600 of them, two replicas have each cut."""
    needed = PairSummed(600.0, 0.0, 0.0).cuts(np.full(6, 400.0), 3)
    assert needed == CutsNeeded(all=10, pair=5)
    assert needed.allow([6, 6, 1]) and not needed.allow([6, 5, 1]) and not needed.allow([10, 3, 3])


@pytest.mark.parametrize("seed", range(30))
def test_the_most_that_replicas_of_some_sizes_end_is_that_of_all_choices(seed: int) -> None:
    draw = random.Random(seed)
    value = np.array([draw.choice([-inf, draw.randint(0, 9)]) for _ in range(draw.randint(3, 9))], dtype=np.float64)
    replicas, needed = draw.randint(2, 4), CutsNeeded(all=draw.randint(0, 6), pair=draw.randint(0, 4))
    worth = [
        float(value[list(sizes)].sum())
        for sizes in itertools.product(range(1, len(value)), repeat=replicas)
        if sum(sizes) < len(value) and needed.allow(sizes)
    ]
    assert most_of_sizes(value, replicas, needed) == max(worth, default=-inf)


@pytest.mark.parametrize("seed", range(6))
def test_choices_of_disjoint_sets_are_all_that_are_worth_enough(seed: int) -> None:
    draw = random.Random(seed)
    devices = tuple(
        Device(name=f"d{k}", region="r", flops_per_s=1e6 * (1 + k % 2), memory_bytes=1 << 40) for k in range(5)
    )
    fleet = Fleet(name="two kinds", devices=devices, links=Links(default=Link(0.01, 1e6)))
    kinds = DeviceKinds(question_of(problem_of(random_graph(1, 4), fleet)), 1 << 30)
    tracked, most, need = Tracked(kinds, (0, 1)), draw.randint(1, 4), draw.randint(3, 12)
    value = np.array([draw.choice([-inf, *range(5)]) for _ in range(tracked.size)], dtype=np.float64)
    found = [tuple(sorted(choice)) for choice in DisjointSets(tracked, value, most).choices(need)]
    counts = tracked.used.max(axis=0)
    expected = [
        choice
        for choice in itertools.combinations_with_replacement(range(tracked.size), most)
        if (tracked.used[list(choice)].sum(axis=0) <= counts).all() and value[list(choice)].sum() >= need
    ]
    assert sorted(found) == sorted(expected)


def test_the_gap_is_told_as_it_falls_and_a_check_proves_the_bound_again() -> None:
    problem = problem_of(gpt_graph(1), fleet_of([2e6, 2e6, 3e6], 2, memory=[900_000] * 3), micro_batches=1)
    found, told = plan("auto", problem), list[float]()
    simple = BoundParts(GraphReading(question_of(problem)), Goal(1e12)).all
    prover = Prover(question_of(problem), found.predicted.step_s)
    bound_s = prover.run(lambda work: work > WORK, lambda progress: told.append(progress.bound_s))
    assert told == sorted(told) and told[-1] == bound_s > min(part.bound_s for part in simple)
    stated = with_certificate(problem, found, LeastBound(bound_s, exact=False))
    verdict = verify(stated, question_of(problem))
    assert verdict.bound.status == "proven" and not verdict.differences


def test_a_check_that_ended_early_tries_the_stated_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(gpt_graph(1), fleet_of([2e6, 2e6, 3e6], 2), micro_batches=2)
    parts, tried = BoundParts(GraphReading(question_of(problem)), Goal(1e12)), list[float]()
    monkeypatch.setattr(several_replicas.SeveralReplicas, "proven", lambda self, limit_s, *_: tried.append(limit_s))
    two = parts.several[0]
    two.advance(lambda: True)
    two.advance(lambda: True)
    two.aim()
    two.advance(lambda: True)
    assert max(tried[:-1]) < 1e12 == tried[-1]


def test_a_fleet_that_is_too_small_has_no_bound() -> None:
    fleet = fleet_of([2.0, 3.0], 1, memory=[10, 10])
    problem = problem_of(random_graph(3, 4), fleet)
    with pytest.raises(FleetTooSmall):
        plan("auto", problem)
    assert Prover(question_of(problem), 1e6).run(lambda work: work > WORK) == 1e6
