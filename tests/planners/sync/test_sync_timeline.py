"""The closed form of an iteration against the channel played out, second by second."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_cases import line_of, problems, profile

from isthmus.planners.sync import SyncProblem, WorkerProfile
from isthmus.planners.sync.timeline import interval_exposed_s, iteration_s, printed_exposed_s, timeline


def ready_after_backward(worker: WorkerProfile) -> list[float]:
    return list(itertools.accumulate(reversed(worker.backward_s)))


def forward_after(worker: WorkerProfile, done: Sequence[float], start: float) -> float:
    """The end of a forward whose layers each wait until `done` (backward order)."""
    now = start
    for layer in reversed(range(len(done))):
        now = max(now, done[layer]) + worker.forward_s[::-1][layer]
    return now


def in_turn(worker: WorkerProfile, chosen: Sequence[int]) -> list[float]:
    """When each layer's average is through if layers go in the order in which they become ready."""
    ready, channel = ready_after_backward(worker), 0.0
    done = [0.0] * len(ready)
    for layer in chosen:
        if average_s := worker.average_s[::-1][layer]:
            done[layer] = channel = max(channel, ready[layer]) + average_s
    return done


def chosen_of(problem: SyncProblem, data: st.DataObject) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(0, len(problem.layers) - 1))))


@given(problems(overlap=False), st.data())
def test_the_channel_takes_layers_as_they_become_ready(problem: SyncProblem, data: st.DataObject) -> None:
    (worker,), chosen = problem.workers, chosen_of(problem, data)
    ready, channel = ready_after_backward(worker), 0.0
    for layer in chosen:
        channel = max(channel, ready[layer]) + worker.average_s[::-1][layer]
    assert iteration_s(line_of(problem), chosen) == sum(worker.forward_s) + max(ready[-1], channel)


@given(problems(overlap=True), st.data())
def test_the_next_forward_waits_for_each_layers_own_average(problem: SyncProblem, data: st.DataObject) -> None:
    (worker,), chosen = problem.workers, chosen_of(problem, data)
    end = forward_after(worker, in_turn(worker, chosen), sum(worker.backward_s))
    assert iteration_s(line_of(problem), chosen) == end


@settings(max_examples=60, deadline=None)
@given(problems(most_layers=5, overlap=True), st.data())
def test_no_order_of_whole_layers_beats_what_the_bound_relies_on(problem: SyncProblem, data: st.DataObject) -> None:
    """Readiness, the averages from there on and the tail: what `start_s` says, whatever order the channel takes."""
    (worker,), chosen, line = problem.workers, chosen_of(problem, data), line_of(problem)
    ready = ready_after_backward(worker)
    ends: list[float] = []
    for order in itertools.permutations(chosen):
        channel, done = 0.0, [0.0] * len(ready)
        for layer in order:
            done[layer] = channel = max(channel, ready[layer]) + worker.average_s[::-1][layer]
        ends.append(forward_after(worker, done, sum(worker.backward_s)))
    for place, layer in enumerate(chosen):
        assert line.start_s[layer] + line.average_s[chosen[place:]].sum() <= min(ends)


@given(problems(most_workers=3))
def test_an_interval_costs_what_its_layers_do(problem: SyncProblem) -> None:
    line = line_of(problem)
    exposed = interval_exposed_s(line)
    for end, start in np.ndindex(exposed.shape):
        if end < start:
            assert exposed[end, start] == np.inf
        else:
            assert exposed[end, start] == iteration_s(line, range(start, end)) - line.compute_s


@given(problems(overlap=False))
def test_the_printed_cost_is_equation_8(problem: SyncProblem) -> None:
    line, (worker,) = line_of(problem), problem.workers
    backward, average = worker.backward_s[::-1], worker.average_s[::-1]
    printed = printed_exposed_s(line)
    for start, end in itertools.combinations(range(len(backward) + 1), 2):
        hidden = sum(backward[start:]) - backward[start]
        term = sum(backward[:start]) + backward[start] + max(hidden, sum(average[start:end]))
        assert printed[end, start] == term - sum(backward)


@given(problems(most_workers=3, overlap=False), st.data())
def test_free_running_workers_are_bounded_by_the_shared_timeline(problem: SyncProblem, data: st.DataObject) -> None:
    """No barrier here: a worker starts as soon as its own iteration is over."""
    chosen = chosen_of(problem, data)
    workers, rounds = problem.workers, 5
    clock = [0.0] * len(workers)
    for _ in range(rounds):
        begun = [now + sum(w.forward_s) for now, w in zip(clock, workers, strict=True)]
        channel = 0.0
        for layer in chosen:
            if any(w.average_s[::-1][layer] for w in workers):
                ready = [b + ready_after_backward(w)[layer] for b, w in zip(begun, workers, strict=True)]
                channel = max(channel, *ready) + max(w.average_s[::-1][layer] for w in workers)
        clock = [max(b + sum(w.backward_s), channel) for b, w in zip(begun, workers, strict=True)]
    alone = [iteration_s(timeline([w], forward_overlap=False), chosen) for w in workers]
    assert rounds * max(alone) <= max(clock) <= rounds * iteration_s(line_of(problem), chosen)


def test_the_drawing_of_the_timeline() -> None:
    """The picture in `timeline.py`: layers 0, 1 and 3 averaged, of which the last sticks out by 2 seconds."""
    worker = profile(forward=[2, 2, 2, 2], backward=[2, 4, 3, 1], average=[2, 9, 6, 3])
    line = timeline([worker], forward_overlap=False)
    assert line.start_s.tolist() == [9.0, 12.0, 16.0, 18.0]
    assert line.compute_s == 18.0
    assert [iteration_s(line, chosen) for chosen in ([], [0], [0, 1], [0, 1, 3])] == pytest.approx([18, 18, 18, 20])
