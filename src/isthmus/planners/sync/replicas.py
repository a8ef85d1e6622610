"""DreamDDP's schedule for the replicas of a plan: which parameters are averaged in which step of a period."""

from __future__ import annotations

from isthmus.cost import Placement, Problem, layouts_of, place, with_sync
from isthmus.cost.sync import buffer_bytes, grouped, owners
from isthmus.planners.sync.problem import SyncPlanner, SyncProblem, WorkerProfile
from isthmus.plans import Plan


def dream_replicas(problem: Problem, plan: Plan, planner: SyncPlanner) -> Plan:
    """The plan with each parameter averaged where a sync planner puts it.

    To the planner a replica is a worker: what its stages do for the last micro-batch is the backward, stage by stage,
    and a stage's parameters are ready together. Messages of a step travel together, so latency counts for none of them.
    """
    placed = [place(problem, x.order, x.boundaries, x.recompute or ()) for x in layouts_of(plan)]
    held = owners([(p.order, p.graphs) for p in placed])
    names = tuple(held)
    average_s = [
        _average_s(problem, held[name].devices, buffer_bytes(problem.flow, [name], "parameters")) for name in names
    ]
    asked = SyncProblem(
        layers=names,
        iterations=problem.sync.every,
        workers=tuple(_profile(f"replica {r}", p, names, average_s) for r, p in enumerate(placed)),
    )
    made = planner(asked)
    steps: dict[str, list[int]] = {name: [] for name in names}
    for step, iteration in enumerate(made.iterations):
        for name in {*iteration.scheduled, *iteration.filled}:
            steps[name].append(step)
    dated = {name: (held[name], tuple(steps[name])) for name in names}
    return with_sync(problem, plan, grouped(problem.flow, problem.fleet, dated, "parameters", problem.sync.every))


def _average_s(problem: Problem, devices: tuple[str, ...], size_bytes: int) -> float:
    """There and back in shards, over the slowest link between two of them."""
    slowest = min(problem.fleet.link(a, b).bandwidth_bytes_per_s for a in devices for b in devices if a != b)
    return 2 * size_bytes / len(devices) / slowest


def _profile(worker: str, placed: Placement, names: tuple[str, ...], average_s: list[float]) -> WorkerProfile:
    """A stage's backward is charged to the first of its parameters, which in backward order is ready last."""
    forward_s, backward_s = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for number, graph in enumerate(placed.graphs):
        here = [op.name for op in graph.variables() if op.name in backward_s and op.name not in graph.shared_from]
        for name in here[:1]:
            forward_s[name] = placed.times.forward_s[number]
            backward_s[name] = placed.times.backward_s[number]
    return WorkerProfile(
        worker=worker,
        forward_s=tuple(forward_s.values()),
        backward_s=tuple(backward_s.values()),
        average_s=tuple(average_s),
    )
