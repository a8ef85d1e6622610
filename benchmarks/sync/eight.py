"""Eight workers in the simulator, on what four measured of layers and links: `python benchmarks/sync/eight.py`.

Each of K workers sends 2 / K of a tensor to every other one, over a link each: with eight, half of what four send. The
latency of two hops stays. Reads results/latest.json, which run.py writes.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec
from rich.console import Console
from rich.table import Table
from run import LATEST, MBIT, Report
from workload import PERIOD

from isthmus.planners.sync import SyncProblem, WorkerProfile, plan_sync
from isthmus.plans import SyncPlan
from isthmus.sync.dream import OURS, PAPER
from isthmus_testing.sync_modes import SyncChoices, SyncedModel, simulate_sync

WORKERS = 8
MODES = ("s-sgd", "asc-wfbp", "every-step", "local", "streaming", "partial", "dreamddp", "dream")
PLANNERS = {"partial": "equal-number", "dreamddp": PAPER.planner, "dream": OURS.planner}


def of_eight(model: SyncedModel, measured_workers: int) -> SyncedModel:
    def average_s(seconds: float) -> float:
        return model.latency_s + (seconds - model.latency_s) * measured_workers / WORKERS

    layers = tuple(replace(x, average_s=average_s(x.average_s) if x.average_s else 0.0) for x in model.layers)
    return replace(model, layers=layers)


def steps_s(model: SyncedModel) -> tuple[dict[str, float], float]:
    """Of each mode, and what no assignment of layers undercuts."""
    layers = model.layers[::-1]
    # What precedes the first layer's forward is charged to it: a plan knows of no other place.
    forward_s = (layers[0].forward_s + model.forward_s, *(x.forward_s for x in layers[1:]))
    profile = WorkerProfile(
        worker="all",
        forward_s=forward_s,
        backward_s=tuple(x.backward_s for x in layers),
        average_s=tuple(x.average_s for x in layers),
    )
    plans: dict[str, SyncPlan] = {}
    found: dict[str, float] = {}
    for mode in MODES:
        choices = SyncChoices()
        if mode in PLANNERS:
            papers = mode == "dreamddp"
            problem = SyncProblem(
                layers=tuple(x.name for x in layers),
                iterations=PERIOD,
                forward_overlap=not papers,
                spare=PAPER.spare if papers else OURS.spare,
                workers=(profile,),
            )
            plans[mode] = plan_sync(PLANNERS[mode], problem)
            choices = SyncChoices(plan=plans[mode], forward_overlap=not papers)
        found[mode] = simulate_sync(mode, model, choices)
    return found, plans["dream"].certificate.lower_bound / PERIOD


def main() -> int:
    drawn = Table("model", "link", title=f"Milliseconds per step, {WORKERS} workers simulated, H = {PERIOD}")
    for heading in ("compute", "wire / H", *MODES, "bound", "dream / bound", "floor"):
        drawn.add_column(heading, justify="right")
    for result in msgspec.json.decode(LATEST.read_bytes(), type=Report).results:
        if result.description.model is None:
            print(f"{result.case.kind}: measured before layers were told: run run.py again", file=sys.stderr)
            continue
        model = of_eight(result.description.model, result.case.workers)
        found, floor_s = steps_s(model)
        times = [model.compute_s, model.wire_s(model.layers) / PERIOD, *(found[mode] for mode in MODES), model.bound_s]
        drawn.add_row(
            result.case.kind,
            f"{result.case.bandwidth_bit_per_s / MBIT:.0f} Mbit/s",
            *(f"{seconds * 1e3:.0f}" for seconds in times),
            f"{found['dream'] / model.bound_s:.2f}",
            f"{floor_s * 1e3:.0f}",
        )
    Console(width=150).print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
