"""What must hold of every sync plan: filling, bound, workers, and the document."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_cases import line_of, problem_of, problems, profile

from isthmus.errors import UserError
from isthmus.option_docs import first_line
from isthmus.planners.sync import (
    SYNC_PLANNERS,
    SyncProblem,
    WorkerProfile,
    plan_sync,
)
from isthmus.planners.sync.build_sync_plan import exposed_bound_s, fill_bubbles
from isthmus.planners.sync.timeline import Timeline, iteration_s, timeline
from isthmus.plans.sync import SyncPlan

NAMES = ("dream", "dream-brute", "dream-dfs", "dream-spread", "equal-number")


@given(problems(most_workers=3), st.sampled_from(NAMES))
def test_every_layer_is_averaged_and_time_adds_up(problem: SyncProblem, name: str) -> None:
    plan, line = plan_sync(name, problem), line_of(problem)
    assert plan.planner == name and len(plan.iterations) == problem.iterations
    scheduled = [layer for i in plan.iterations for layer in i.scheduled]
    assert sorted(scheduled) == sorted(problem.layers)
    assert name == "dream-spread" or scheduled == [*problem.layers[::-1]]
    for step, iteration in enumerate(plan.iterations):
        assert not {*iteration.scheduled} & {*iteration.filled}
        assert {*plan.averaged(step + problem.iterations)} == {*iteration.scheduled, *iteration.filled}
        numbers = [problem.layers[::-1].index(name) for name in plan.averaged(step)]
        assert numbers == sorted(numbers)
        assert iteration.iteration_s == iteration_s(line, numbers) == line.compute_s + iteration.exposed_s
    assert plan.period_s == sum(i.iteration_s for i in plan.iterations) == plan.step_s * problem.iterations
    assert plan.exposed_s == plan.period_s - problem.iterations * line.compute_s


@given(problems(most_workers=3), st.data())
def test_filling_costs_nothing_and_leaves_no_room(problem: SyncProblem, data: st.DataObject) -> None:
    line = line_of(problem)
    chosen = sorted(data.draw(st.sets(st.integers(0, line.count - 1))))
    taken = iteration_s(line, chosen)
    filled = fill_bubbles(line, chosen, past_gaps=True)
    assert iteration_s(line, sorted({*filled, *chosen})) == taken
    for layer in {*range(line.count)} - {*filled, *chosen}:
        more = sorted({*filled, *chosen, layer})
        assert line.average_s[layer] == 0 or iteration_s(line, more) > taken


@given(problems(most_workers=3), st.data(), st.integers(0, 9))
def test_fillings_leave_what_is_to_be_spared(problem: SyncProblem, data: st.DataObject, spare_s: int) -> None:
    """Were each filled layer so much longer, the iteration would be as long as before."""
    line = line_of(problem)
    chosen = sorted(data.draw(st.sets(st.integers(0, line.count - 1))))
    filled = fill_bubbles(line, chosen, past_gaps=True, spare_s=spare_s)
    for layer in filled:
        longer = line.average_s.copy()
        longer[layer] += spare_s
        delayed = Timeline(line.compute_s, line.ready_s, line.tail_s, longer)
        assert iteration_s(delayed, sorted({*filled, *chosen})) == iteration_s(line, chosen)


@given(problems(overlap=False), st.data())
def test_filling_as_the_paper_does_takes_at_least_equation_12(problem: SyncProblem, data: st.DataObject) -> None:
    line, (worker,) = line_of(problem), problem.workers
    start = data.draw(st.integers(0, line.count - 1))
    end = data.draw(st.integers(start + 1, line.count))
    backward, average = worker.backward_s[::-1], worker.average_s[::-1]
    hidden = sum(backward[start:]) - backward[start]
    scheduled = sum(average[start:end])
    latest = 0
    while latest < start and max(hidden, sum(average[: latest + 1]) + scheduled) <= max(hidden, scheduled):
        latest += 1
    filled = fill_bubbles(line, range(start, end), past_gaps=False)
    with_parameters = [layer for layer in range(start) if average[layer] > 0]
    assert list(filled) == with_parameters[: len(filled)]
    assert {*filled} >= {layer for layer in with_parameters if layer < latest}
    assert {*filled} <= {*fill_bubbles(line, range(start, end), past_gaps=True)}


def test_the_papers_rule_stops_at_a_scheduled_layer_that_needs_no_average() -> None:
    line = timeline([profile(forward=[0] * 3, backward=[1, 0, 0], average=[0, 1, 0])], forward_overlap=False)
    assert fill_bubbles(line, range(1), past_gaps=False) == ()


def test_a_large_output_layer_does_not_keep_others_from_being_filled() -> None:
    worker = profile(forward=[0] * 4, backward=[2, 2, 2, 2], average=[1, 1, 1, 9])
    line = timeline([worker], forward_overlap=False)
    assert fill_bubbles(line, range(3, 4), past_gaps=False) == ()
    assert fill_bubbles(line, range(3, 4), past_gaps=True) == (1, 2)


def least_exposed(problem: SyncProblem) -> float:
    """Over every assignment of layers to iterations."""
    line = line_of(problem)
    found: list[float] = []
    for places in itertools.product(range(problem.iterations), repeat=line.count):
        sets = [[k for k, place in enumerate(places) if place == h] for h in range(problem.iterations)]
        found.append(sum(iteration_s(line, layers) - line.compute_s for layers in sets))
    return min(found)


@settings(max_examples=150, deadline=None)
@given(problems(most_layers=5, most_iterations=3, most_workers=2))
def test_no_assignment_beats_the_bound(problem: SyncProblem) -> None:
    bound = exposed_bound_s(line_of(problem), problem.iterations)
    least = least_exposed(problem)
    assert 0 <= bound <= least
    apart = problem.forward_overlap and len(problem.workers) > 1  # one is ready late, another has the longer tail
    alone = problem.iterations >= len(problem.layers)
    if not apart and (alone or (problem.iterations == 1 and not problem.forward_overlap)):
        assert bound == least
    plan = plan_sync("dream", problem)
    compute = problem.iterations * line_of(problem).compute_s
    assert plan.certificate.lower_bound == compute + bound
    assert plan.certificate.gap == pytest.approx((plan.period_s - compute - bound) / (compute + bound))


@given(problems(most_workers=3, overlap=False))
def test_the_slowest_worker_is_named(problem: SyncProblem) -> None:
    plan = plan_sync("dream", problem)
    alone = {w.worker: w.alone_s for w in plan.workers}
    assert [*alone] == [w.worker for w in problem.workers]
    assert alone[plan.slowest] == max(alone.values()) <= plan.period_s
    assert all(w.waits_s == plan.period_s - w.alone_s for w in plan.workers)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_is_slowest_throughout_sets_the_period(overlap: bool) -> None:
    fast = profile([1, 1, 1], [2, 2, 2], [3, 4, 2], worker="fast")
    slow = profile([2, 1, 2], [4, 3, 2], [7, 4, 9], worker="slow")
    both = plan_sync("dream", problem_of(fast, slow, iterations=2, forward_overlap=overlap))
    alone = plan_sync("dream", problem_of(slow, iterations=2, forward_overlap=overlap))
    assert both.slowest == "slow" and both.period_s == alone.period_s
    assert [w.waits_s > 0 for w in both.workers] == [True, False]


def test_overlap_with_the_next_forward_hides_more() -> None:
    worker = profile([3, 3, 3], [1, 1, 1], [0, 0, 6])
    apart, over = (plan_sync("dream", problem_of(worker, iterations=1, forward_overlap=o)) for o in (False, True))
    assert (apart.exposed_s, over.exposed_s) == (4.0, 0.0)


def test_the_plan_is_one_json_document() -> None:
    plan = plan_sync("dream", problem_of(profile([1, 1], [2, 2], [3, 1]), iterations=2))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=SyncPlan) == plan
    assert plan.averaged(0) == ("layer-1",) and plan.averaged(3) == ("layer-1", "layer-0")


def test_planners_are_listed_and_described() -> None:
    assert sorted(SYNC_PLANNERS) == [*NAMES]
    assert first_line(SYNC_PLANNERS["equal-number"]).startswith("The same number of layers in every iteration")
    with pytest.raises(UserError, match="unknown sync planner 'dreem': did you mean 'dream'"):
        plan_sync("dreem", problem_of(profile([1], [1], [1]), iterations=1))


ONE = profile([1], [1], [1], worker="a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ()}, "layers: got none"),
        ({"workers": ()}, "workers: got none"),
        ({"workers": (ONE, ONE)}, "workers: got 'a' twice"),
        ({"iterations": 0}, "iterations: got 0, expected at least 1"),
        ({"spare": 1.5}, "spare: got 1.5, expected 0 to 1"),
        ({"layers": ("x", "y")}, "worker 'a': forward_s: got 1 times, expected 2"),
        ({"workers": (profile([1], [0], [1]),)}, "backward_s: got a sum of 0"),
    ],
)
def test_a_bad_problem_is_refused(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"layers": ("x",), "workers": (ONE,), "iterations": 1}
    with pytest.raises(UserError, match=message):
        SyncProblem(**{**good, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("time_s", [-1.0, float("nan"), float("inf")])
def test_a_bad_time_is_refused(time_s: float) -> None:
    with pytest.raises(UserError, match=r"worker 'a': average_s\[1\]: got .* expected a finite number of seconds"):
        WorkerProfile(worker="a", forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), average_s=(1.0, time_s))
