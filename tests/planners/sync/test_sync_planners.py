"""Exact planners against brute force, the paper's search against its pseudocode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from sync_cases import line_of, problem_of, problems, profile

from isthmus.errors import UserError
from isthmus.planners.sync import SYNC_PLANNERS, SyncProblem, plan_sync
from isthmus.planners.sync.baselines import best_of_all, equal_ends, search
from isthmus.planners.sync.dream import cheapest_ends
from isthmus.planners.sync.timeline import Floats, Timeline, interval_exposed_s, printed_exposed_s

Sets = list[list[int]]


def all_ends(layers: int, iterations: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.product(range(layers + 1), repeat=iterations - 1):
        if all(a <= b for a, b in pairwise(inner)):
            yield (*inner, layers)


def cost(exposed_s: Floats, ends: tuple[int, ...]) -> float:
    return sum(float(exposed_s[end, start]) for start, end in pairwise((0, *ends)))


@pytest.mark.parametrize("costs", [interval_exposed_s, printed_exposed_s])
@given(problem=problems(most_workers=2))
def test_dream_equals_brute_force(costs: Callable[[Timeline], Floats], problem: SyncProblem) -> None:
    line = line_of(problem)
    exposed = costs(line)
    ends = cheapest_ends(exposed, line.elapsed_s, problem.iterations)
    every = list(all_ends(len(problem.layers), problem.iterations))
    best = min(cost(exposed, e) for e in every)
    assert len(ends) == problem.iterations
    assert cost(exposed, ends) == pytest.approx(best, rel=1e-9)
    assert cost(exposed, best_of_all(exposed, problem.iterations)) == best
    evenest = min(unevenness(line, e) for e in every if cost(exposed, e) == best)
    assert unevenness(line, ends) <= evenest * (1 + 1e-9)


def unevenness(line: Timeline, ends: tuple[int, ...]) -> float:
    return sum(float(line.average_s[start:end].sum()) ** 2 for start, end in pairwise((0, *ends)))


def test_equal_schedules_load_the_iterations_evenly() -> None:
    worker = profile(forward=[0] * 4, backward=[4, 4, 4, 4], average=[0, 1, 1, 1])
    plan = plan_sync("dream", problem_of(worker, iterations=3))
    assert [len(i.scheduled) for i in plan.iterations] == [1, 1, 2]


def test_what_is_still_equal_is_averaged_as_early_as_possible() -> None:
    worker = profile(forward=[0] * 4, backward=[4, 4, 4, 4], average=[0, 0, 0, 0])
    plan = plan_sync("dream", problem_of(worker, iterations=3))
    assert [len(i.scheduled) for i in plan.iterations] == [4, 0, 0]


def algorithm_2(backward: list[float], average: list[float], iterations: int) -> list[Sets]:
    """Algorithm 2 line by line, with its slips mended: all solutions it finds.

    Layers are numbered 1 (first of the model) to L, sets 1 to H; set 0 is not used.
    """

    def t_bp(layers: list[int]) -> float:
        return sum(backward[i - 1] for i in layers)

    def t_comm(layers: list[int]) -> float:
        return sum(average[i - 1] for i in layers)

    def solve(psi: Sets, layer: int, h: int) -> None:
        if layer == 0:
            omega.append(psi)
            return
        if h == iterations:
            for i in range(layer, 0, -1):
                psi[h].append(i)
            omega.append(psi)  # printed inside the loop, where layers are still missing
            return
        remaining = [*psi[h], *range(layer, 0, -1)]  # layers of sets h to H
        if not psi[h]:
            psi[h].append(layer)
            solve(psi, layer - 1, h)
            return
        hidden = t_bp(remaining) - t_bp(psi[h][:1])
        if hidden >= t_comm([*psi[h], layer]):
            psi[h].append(layer)
            solve(psi, layer - 1, h)
        elif hidden < t_comm(psi[h]):
            solve(psi, layer, h + 1)
        else:
            minus = copy.deepcopy(psi)
            minus[h].append(layer)
            plus = copy.deepcopy(psi)
            solve(minus, layer - 1, h)  # printed with plus, which is made only after
            solve(plus, layer, h + 1)  # printed with h - 1, against Eq. 10

    omega: list[Sets] = []
    solve([[] for _ in range(iterations + 1)], len(backward), 1)
    return omega


def equation_8(sets: Sets, backward: list[float], average: list[float]) -> float:
    total, before = 0.0, 0.0
    for layers in sets[1:]:
        first = backward[layers[0] - 1] if layers else 0.0
        behind = sum(backward) - before - first
        total += before + first + max(behind, sum(average[i - 1] for i in layers))
        before += sum(backward[i - 1] for i in layers)
    return total


@settings(max_examples=300)
@given(problems(most_layers=9, most_iterations=5, overlap=False))
def test_dream_dfs_equals_its_pseudocode(problem: SyncProblem) -> None:
    (worker,) = problem.workers
    backward, average = list(worker.backward_s), list(worker.average_s)
    omega = algorithm_2(backward, average, problem.iterations)
    found, line = search(line_of(problem), problem.iterations), line_of(problem)
    assert found.leaves == len(omega)
    exposed = cost(printed_exposed_s(line), found.ends)
    best = min(equation_8(sets, backward, average) for sets in omega)
    assert problem.iterations * sum(backward) + exposed == best


@given(problems(most_layers=9, most_workers=2))
def test_dream_is_never_worse_than_the_others(problem: SyncProblem) -> None:
    periods = {name: plan_sync(name, problem).period_s for name in SYNC_PLANNERS}
    assert periods["dream"] == periods["dream-brute"]
    assert periods["dream"] <= min(periods["dream-dfs"], periods["equal-number"])


def test_the_papers_search_may_miss_the_best_plan() -> None:
    problem = problem_of(profile([0] * 4, [1, 2, 3, 3], [1, 1, 3, 1]), iterations=3)
    assert [plan_sync(name, problem).period_s for name in ("dream", "dream-dfs")] == [28, 29]


@given(problems(most_layers=9, most_iterations=12))
def test_equal_number_gives_every_iteration_the_same(problem: SyncProblem) -> None:
    ends = equal_ends(len(problem.layers), problem.iterations)
    sizes = [end - start for start, end in pairwise((0, *ends))]
    assert sum(sizes) == len(problem.layers) and len(sizes) == problem.iterations
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_brute_force_refuses_what_it_cannot_finish() -> None:
    worker = profile(forward=[1] * 60, backward=[1] * 60, average=[1] * 60)
    with pytest.raises(UserError, match="dream-brute: got 60 layers in 10 iterations, 56,672,074,888 schedules"):
        plan_sync("dream-brute", problem_of(worker, iterations=10))
