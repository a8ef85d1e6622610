"""Small sync problems in whole seconds, so that ties are frequent and sums are exact."""

from __future__ import annotations

from hypothesis import strategies as st

from isthmus.planners.sync import SyncProblem, WorkerProfile
from isthmus.planners.sync.timeline import Timeline, timeline


@st.composite
def problems(
    draw: st.DrawFn,
    most_layers: int = 7,
    most_iterations: int = 4,
    most_workers: int = 1,
    overlap: bool | None = None,
) -> SyncProblem:
    count = draw(st.integers(1, most_layers))
    seconds = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    workers: list[WorkerProfile] = []
    for number in range(draw(st.integers(1, most_workers))):
        backward = draw(seconds.filter(any))
        workers.append(profile(draw(seconds), backward, draw(seconds), worker=f"worker-{number}"))
    return SyncProblem(
        layers=tuple(f"layer-{k}" for k in range(count)),
        workers=tuple(workers),
        iterations=draw(st.integers(1, most_iterations)),
        forward_overlap=draw(st.booleans()) if overlap is None else overlap,
    )


def profile(forward: list[int], backward: list[int], average: list[int], worker: str = "worker") -> WorkerProfile:
    """Times in forward order."""
    times = [tuple(map(float, seconds)) for seconds in (forward, backward, average)]
    return WorkerProfile(worker=worker, forward_s=times[0], backward_s=times[1], average_s=times[2])


def problem_of(*workers: WorkerProfile, iterations: int, forward_overlap: bool = False) -> SyncProblem:
    layers = tuple(f"layer-{k}" for k in range(len(workers[0].average_s)))
    return SyncProblem(layers=layers, workers=workers, iterations=iterations, forward_overlap=forward_overlap)


def line_of(problem: SyncProblem) -> Timeline:
    return timeline(problem.workers, forward_overlap=problem.forward_overlap)
