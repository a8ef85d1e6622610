"""What a group of devices takes to sum gradients is bounded by collectives that the cost model times."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from plan_cases import fleet_of, problem_of, random_graph
from test_verify import question_of

from isthmus.cost.sync import fastest, sync_s
from isthmus.fleet import Fleet, Link, Links, Region
from isthmus.plans import ReplicaSync, SyncGroup
from isthmus.verification.group_times import GroupTimes
from isthmus.verification.sums import rounds_of


@pytest.mark.parametrize("seed", range(52))
def test_no_order_of_the_devices_sums_sooner(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 5) if seed < 40 else draw.randint(6, 8)
    fleet = fleet_of([1.0] * count, seed)
    if seed % 2:
        slow = Link(draw.choice([0.0, 0.1]), draw.uniform(50, 5000))
        sites = tuple(msgspec.structs.replace(d, region=draw.choice("ab")) for d in fleet.devices)
        fleet = Fleet(name="sites", devices=sites, links=Links(intra=Link(0.0, 5000.0), default=slow))
    uplinks = seed % 4 == 1
    if uplinks:
        regions = tuple(
            Region(region=name, uplink_bytes_per_s=draw.uniform(20, 500))
            for name in sorted({d.region for d in fleet.devices})
        )
        fleet = msgspec.structs.replace(fleet, region_info=regions)
    blocks = np.array([4.0 * draw.randint(0, 3000) for _ in range(3)])
    question = question_of(problem_of(random_graph(1, 4), fleet))
    times = GroupTimes(question, [[name] for name in fleet.names], blocks, 3)
    found = times.sums(tuple(range(count)), np.arange(3), 3)
    orders = (
        list(itertools.permutations(fleet.names)) if count < 6 else [draw.sample(fleet.names, count) for _ in range(9)]
    )
    for start, order in itertools.product(range(3), orders):
        size_bytes = int(blocks[start:].sum())
        if not size_bytes:
            assert found.seconds[start] == found.carried[start] == 0
            continue
        group = fastest(fleet, SyncGroup(devices=tuple(order), parameters=(), iterations=(0,), size_bytes=size_bytes))
        seconds = sync_s(fleet, ReplicaSync(groups=(group,)))
        # An element of each part is rounded away, in each of the rounds.
        rounding_s = (
            8 * count * max(1 / fleet.link(a, b).bandwidth_bytes_per_s for a, b in itertools.permutations(order, 2))
        )
        assert found.seconds[start] <= seconds * (1 + 1e-9)
        if count < 6 and not uplinks:
            assert seconds <= found.seconds[start] + rounding_s
        for a, b in itertools.permutations(order, 2):
            sent = sum(size for turn in rounds_of(group) for x, y, size in turn if (x, y) == (a, b))
            assert found.carried[start] <= sent


def test_in_a_period_of_steps_each_group_may_have_its_own() -> None:
    problem = problem_of(random_graph(1, 4), fleet_of([1.0] * 2, 3))
    once = question_of(problem)
    every = [GroupTimes(q, [["d0"], ["d1"]], np.array([4000.0]), 1) for q in (once, replace(once, period=4))]
    alone, shared = (times.sums((0, 1), np.arange(1), 1) for times in every)
    assert shared.seconds[0] == pytest.approx(alone.seconds[0] / 4)
    assert alone.carried[0] == 4000 and shared.carried[0] == 0
