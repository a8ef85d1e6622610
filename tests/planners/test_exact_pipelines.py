"""The search of one replica ends with the best of all pipelines: found by brute force.

Goals are above the best, so that a bound that is none would show. `make test` looks at a few of 500 problems.
"""

from __future__ import annotations

import random
import sys
from math import inf

import pytest
from plan_cases import fleet_of, problem_of, random_graph, saving
from test_verify import question_of, two_sites
from tests.tiers import THOROUGH

from isthmus.cost import Problem
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.plans import Constraints
from isthmus.verification import one_replica
from isthmus.verification.pipelines import Goal
from isthmus.verification.prover import BoundParts
from isthmus.verification.reading import GraphReading
from isthmus.verification.search import OutOfWork, PlanSearch

pytestmark = pytest.mark.thorough

ALL = 500
STEP = 1 if THOROUGH else 25
EFFORT = 0.3 if THOROUGH else 0.02
"""Of brute force."""
WORK = 2e8


def pipeline_problem(seed: int) -> Problem:
    """Skips and shared parameters; short memory, recomputation; links one way, uplinks, alike devices; data holders."""
    draw = random.Random(f"pipelines {seed}")
    devices, units, count = draw.randint(2, 6), draw.randint(3, 7), draw.choice([1, 2, 5, 9, 64])
    memory = [draw.choice([400, draw.randint(100, 2500)]) for _ in range(devices)] if seed % 2 else None
    fleet = fleet_of([draw.choice([10.0, 20.0, draw.uniform(5, 50)]) for _ in range(devices)], seed, memory=memory)
    if seed % 7 == 0:
        fleet = two_sites(draw.uniform(5, 500), seed)
    elif seed % 3 == 0:
        speeds = {region: draw.uniform(5, 50) for region in "ab"}
        several = tuple(
            Device(name=f"d{k}", region="ab"[k % 2], flops_per_s=speeds["ab"[k % 2]], memory_bytes=1 << 30)
            for k in range(devices)
        )
        links = Links(intra=Link(0.05, 500.0), default=Link(draw.choice([0.0, 0.4]), draw.uniform(5, 100)))
        fleet = Fleet(name="alike", devices=several, links=links)
    held = draw.sample(fleet.names, draw.randint(1, len(fleet.names))) if seed % 5 == 1 else ()
    return problem_of(
        saving(random_graph(seed, units), draw.choice([1, 9])),
        fleet,
        micro_batches=count,
        schedule=draw.choice(["1f1b", "1f1b", "gpipe"]),
        recompute=seed % 4 > 0,
        constraints=Constraints(data_holders=tuple(held)),
    )


def by_brute_force(reading: GraphReading, *, several: bool) -> float:
    """Seconds of the best plan of one replica, or of several."""
    search = PlanSearch(reading, priced=False, effort=EFFORT)
    try:
        return (search.several if several else search.single)(1e12).known
    except OutOfWork:
        pytest.skip("more plans than brute force tries")


@pytest.mark.parametrize("seed", range(0, ALL, STEP))
def test_the_bound_of_one_replica_is_the_best_pipeline(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with devices counted, and once with prices alone."""
    reading = GraphReading(question_of(pipeline_problem(seed)))
    best_s = by_brute_force(reading, several=False)
    if best_s == inf:
        return
    for few_states in (one_replica.FEW_STATES, 1):
        monkeypatch.setattr(one_replica, "FEW_STATES", few_states)
        parts = BoundParts(reading, Goal(1.2 * best_s))
        while not parts.single.stuck and parts.work < WORK:
            parts.single.advance(lambda parts=parts: parts.work > WORK)
        assert parts.single.bound_s == pytest.approx(best_s, rel=1e-9)
        monkeypatch.setattr(one_replica, "MOST_ENTRIES", 1)


@pytest.mark.parametrize("seed", range(0, ALL, STEP))
def test_the_bound_of_several_replicas_is_the_best_plan(seed: int) -> None:
    """Which is come upon as well: the goal above it becomes what it takes."""
    reading = GraphReading(question_of(pipeline_problem(seed)))
    best_s = by_brute_force(reading, several=True)
    if best_s == inf:
        return
    goal = Goal(1.2 * best_s)
    parts = BoundParts(reading, goal)
    for part in parts.several:
        while not part.stuck and part.bound_s < goal.step_s and parts.work < WORK:
            part.advance(lambda parts=parts: parts.work > WORK)
    assert parts.several_s <= best_s * (1 + 1e-9) <= goal.step_s * (1 + 2e-9)
    if parts.work < WORK:
        assert goal.step_s == pytest.approx(best_s, rel=1e-9)
        assert sum(setup.micro_batches for setup in goal.found) == reading.question.micro_batches
        assert parts.several_s == pytest.approx(best_s, rel=1e-9)


def test_all_devices_may_be_replicas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 500: five devices hold five times the model, which a sum of products misses by a rounding error."""
    monkeypatch.setattr(sys.modules[__name__], "EFFORT", 0.3)
    test_the_bound_of_several_replicas_is_the_best_plan(384)
