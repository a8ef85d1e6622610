"""`auto` against every plan of small problems, and against the other planners on larger ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph
from term_cases import every_plan
from tests.tiers import represented_by

from isthmus.cost import Problem, layouts_of
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import Device, Fleet, Link, Links, resolve_fleet
from isthmus.graph import Flow
from isthmus.planners import plan, planner_names
from isthmus.planners.search import prune_fleet
from isthmus.planners.search.auto import auto
from isthmus.planners.search.local_search import share_out
from isthmus.planners.search.one_pipeline import chain
from isthmus.planners.search.replicas import replica_counts
from isthmus.plans import Constraints, Plan
from isthmus.protocol import RunSpec
from isthmus.simulator import simulate
from isthmus.trace import step_bounds


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cut in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cut, total)))


@given(seed=st.integers(0, 10**6), devices=st.integers(1, 3), units=st.integers(2, 4), micro_batches=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
@example(seed=63, devices=3, units=2, micro_batches=3)  # the order of its replicas counts
def test_auto_is_within_two_percent_of_brute_force_and_above_its_bound(
    seed: int, devices: int, units: int, micro_batches: int
) -> None:
    speeds = [1 + (seed * (k + 3)) % 7 for k in range(devices)]
    problem = Problem(
        flow=Flow(random_graph(seed, units)),
        fleet=fleet_of(speeds, seed),
        micro_batch_size=2,
        micro_batches=micro_batches,
    )
    best_s = min(plan.predicted.step_s for plan in every_plan(problem))
    found = auto(problem)
    assert best_s * (1 - 1e-9) <= found.predicted.step_s <= 1.02 * best_s
    assert found.predicted.step_s <= chain(problem).predicted.step_s


@pytest.mark.parametrize(
    "fleet",
    represented_by(
        ("random:2:5", "random:4:1", "random:6:7", "random:8:3", "dtfm-case2", "three-sites"),
        "random:2:5",
    ),
)
def test_auto_is_no_worse_than_the_others(fleet: str) -> None:
    whole = resolve_fleet(fleet)
    problem = problem_of(gpt_graph(3), whole.thin(min(8, len(whole.devices))), micro_batches=8)
    found = auto(problem).predicted.step_s
    for name in set(planner_names()) - {"auto", "sky-optimal", "dtfm-genetic", "dtfm-genetic-code", "dtfm-kl"}:  # slow
        try:
            other = plan(name, problem).predicted.step_s
        except UserError:
            continue
        assert found <= other * (1 + 1e-9), name


@given(
    times=st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=4),
    more=st.integers(0, 8),
)
def test_shares_end_as_early_as_possible(times: list[tuple[float, float]], more: int) -> None:
    total = len(times) + more

    def end(split: Sequence[int]) -> float:
        return max(fill + (m - 1) * period for (fill, period), m in zip(times, split, strict=True))

    found = share_out(times, total)
    assert sum(found) == total and min(found) >= 1
    assert end(found) == pytest.approx(min(end(split) for split in shares(total, len(times))))


def test_replica_counts_are_few_and_reach_both_ends() -> None:
    assert replica_counts(1) == []
    assert replica_counts(2) == [2]
    assert replica_counts(7) == [2, 3, 4, 5, 7]
    assert replica_counts(64) == [2, 3, 4, 5, 8, 16, 32, 64]
    assert max(map(len, map(replica_counts, range(1, 2000)))) <= 12


def test_many_micro_batches_on_equal_near_devices_make_replicas() -> None:
    """Nothing to average quickly enough would make one pipeline; here links are fast and cuts are few."""
    problem = Problem(
        flow=Flow(random_graph(3, 2)), fleet=fleet_of([1, 1, 1, 1], 0), micro_batch_size=1, micro_batches=16
    )
    found = auto(problem)
    assert len(found.replicas) > 1
    assert sum(r.micro_batches for r in found.replicas) == 16
    assert sorted(found.devices) == sorted(problem.fleet.names)
    assert found.predicted.step_s < chain(problem).predicted.step_s


def test_the_scorer_has_the_last_word() -> None:
    problem = Problem(flow=Flow(random_graph(5, 4)), fleet=fleet_of([1, 2, 3], 1), micro_batch_size=1, micro_batches=8)
    seen: list[Plan] = []

    def prefers_the_last(plan: Plan) -> float:
        seen.append(plan)
        return -len(seen)

    found = auto(replace(problem, schedule="zero-bubble"), prefers_the_last)  # which has no descent by the steady step
    assert found.replicas == seen[-1].replicas
    cuts = [frozenset((x.order, x.boundaries) for x in layouts_of(plan)) for plan in seen]
    assert 3 < len(seen) <= 32 and len(set(cuts)) == len(cuts), "each cut once, and more than the first few"
    assert [p.predicted.step_s for p in seen] == sorted(p.predicted.step_s for p in seen)


def test_where_the_scorer_differs_from_the_steady_step_moves_go_by_the_scorer() -> None:
    """Two equal devices, each a replica, of which only the scorer knows that one is half as fast: it gets 3 of 9."""
    fleet = Fleet(name="near", devices=fleet_of([10.0, 10.0]).devices, links=Links(default=Link(1e-6, 1e9)))
    problem = problem_of(random_graph(3, 2), fleet, micro_batches=9)
    each_s = problem.cumulative_flops[-1] / 10.0

    def half_as_fast(plan: Plan) -> float:
        slow = [any(stage.device == "d1" for stage in r.stages) for r in plan.replicas]
        return max(r.micro_batches * each_s * (1 + late) for r, late in zip(plan.replicas, slow, strict=True))

    found = auto(problem, half_as_fast)
    assert {r.stages[0].device: r.micro_batches for r in found.replicas} == {"d0": 6, "d1": 3}


def simulated_s(problem: Problem, plan: Plan) -> float:
    spec = RunSpec(steps=6, micro_batches=problem.micro_batches, micro_batch_size=problem.micro_batch_size)
    ends = [end_s for _, end_s in step_bounds(simulate(plan, problem.fleet, spec)).values()]
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("seeds", represented_by([[1, 2, 4, 7], [0, 1, 3, 5, 6]], [1, 2, 4, 7]))
def test_the_descent_by_the_steady_step_is_one_by_simulated_time(
    monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]
) -> None:
    """Beside the same search without it."""
    gains = list[float]()
    monkeypatch.setattr("isthmus.planners.search.improvement.MOST_STEADY", 3000)
    for seed in seeds:
        source = random.Random(seed)
        fleet = fleet_of([source.uniform(1, 4) for _ in range(source.randint(2, 5))], seed)
        flow, count = Flow(random_graph(seed, source.randint(5, 9))), source.choice((1, 4, 8))
        problem = Problem(flow=flow, fleet=fleet, micro_batch_size=1, micro_batches=count)
        judge = partial(simulated_s, problem)
        found = judge(auto(problem, judge))
        with monkeypatch.context() as patched:
            patched.setattr("isthmus.planners.search.auto.is_steady", lambda _: False)
            gains.append(judge(auto(problem, judge)) / found)
    assert min(gains) >= 1 - 1e-9 and max(gains) > 1.02, gains


def flat_fleet(memory_bytes: Sequence[int], speeds: Sequence[float]) -> Fleet:
    devices = tuple(
        Device(name=f"d{k}", region="here", flops_per_s=speed, memory_bytes=held)
        for k, (held, speed) in enumerate(zip(memory_bytes, speeds, strict=True))
    )
    return Fleet(name="flat", devices=devices, links=Links(default=Link(1e-4, 1e9)))


@pytest.fixture
def soon_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets of more than sixteen devices are narrowed, as others are beyond 64."""
    monkeypatch.setattr(prune_fleet, "MOST_DEVICES", 16)


@pytest.mark.long
def test_a_large_fleet_whose_memory_is_on_its_slow_devices(soon_large: None) -> None:
    fleet = flat_fleet([40 << 10] * 15 + [64 << 20] * 5, [1e9] * 15 + [2e8] * 5)
    problem = problem_of(gpt_graph(2), fleet, micro_batches=4)
    found = plan("auto", problem)
    assert found.predicted.step_s <= plan("op-fence", problem).predicted.step_s * (1 + 1e-9)


def test_a_large_fleet_that_holds_nothing_is_refused(soon_large: None) -> None:
    problem = problem_of(gpt_graph(1), flat_fleet([1 << 10] * 18, [1e9] * 18), micro_batches=4)
    with pytest.raises(FleetTooSmall, match="short"):
        plan("auto", problem)


def test_the_scorer_s_seconds_are_turned_into_money_where_money_counts() -> None:
    fleet = flat_fleet([1 << 30] * 3, [1e6, 2e6, 4e6])
    priced = msgspec.structs.replace(
        fleet,
        devices=tuple(
            msgspec.structs.replace(d, price_per_hour=price)
            for d, price in zip(fleet.devices, (0.1, 5.0, 50.0), strict=True)
        ),
    )
    problem = problem_of(gpt_graph(1), priced, micro_batches=4, constraints=Constraints(objective="cost"))
    assert plan("auto", problem, score=lambda made: made.predicted.step_s).devices == plan("chain", problem).devices


def test_one_device_that_holds_the_data_leaves_nothing_to_move() -> None:
    constraints = Constraints(data_holders=("d0",))
    for count in (1, 2):
        fleet = fleet_of([10.0, 5.0][:count])
        found = plan("auto", problem_of(random_graph(1, 1), fleet, constraints=constraints))
        assert found.devices == ("d0",)
