"""Plans that compress slow replicas alone, beside plans that compress all messages or none: loss per second.

`python benchmarks/mixed/run.py [--part plan|train] [--only PATTERN] [--most N] [--steps N] [--json PATH]`.
What came out: README.md.

Figures that the results file holds are not made again. `--most` bounds how many are made at once, `--only` names them.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import isthmus
from isthmus.api.observer import Silent
from isthmus.plans import Plan, load_plan, save_plan
from isthmus.report.boundary_table import replica_line
from isthmus.trace import steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
FLEETS = ("lan-and-homes", "lan-and-tablets", "site-and-branch", "workstation-and-dsl")
EMULATED = ("lan-and-homes", "lan-and-tablets")
"""Fleets on which the plans are run over emulated links; on the others steps take what the simulator says."""
WAYS: dict[str, dict[str, object]] = {
    "none": {"compression": None},
    "all int4": {"compression": {"method": "int4"}},
    "mixed": {},
}
"""What is changed in job.toml, by the way of packing."""
STEPS = 160
SIMULATED = 16
EVERY = 16
SEEDS = (0,)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    step_s: float
    """By the closed form."""
    simulated_s: float
    gap: float
    """Proven."""
    replicas: list[str]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    losses: list[float]
    """Held out, every EVERY steps."""
    measured_s: float | None
    """A step over emulated links."""


class Report(msgspec.Struct, kw_only=True):
    host: str
    plans: dict[str, Planned]
    """By fleet and way."""
    runs: dict[str, Trained]
    """By fleet, way and seed."""


def _overrides(fleet: str, way: str) -> dict[str, object]:
    return {"fleet": str(HERE / "fleets" / f"{fleet}.toml"), **WAYS[way]}


def _plan(fleet: str, way: str) -> Plan:
    """Kept beside the figures: planning takes a while."""
    path = HERE / "results" / f"{fleet} {way}.json".replace(" ", "-")
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        save_plan(isthmus.plan(HERE / "job.toml", overrides=_overrides(fleet, way)), path)
    return load_plan(path)


def planned(fleet: str, way: str) -> Planned:
    plan = _plan(fleet, way)
    trace = isthmus.simulate(plan, str(HERE / "fleets" / f"{fleet}.toml"), steps=SIMULATED)
    return Planned(
        step_s=plan.predicted.step_s,
        simulated_s=steady_step_s(trace),
        gap=plan.certificate.gap if plan.certificate else float("inf"),
        replicas=list(map(replica_line, plan.replicas)),
    )


def trained(fleet: str, way: str, seed: int, steps: int) -> Trained:
    """Over emulated links where the fleet is one of those: then a step takes what it takes."""
    emulated = fleet in EMULATED
    changed = _overrides(fleet, way) | {
        "training.steps": steps,
        "training.eval_every": EVERY,
        "training.seed": seed,
        "runtime.emulate": emulated,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = isthmus.train(
            HERE / "job.toml", plan=_plan(fleet, way), overrides=changed, run=Path(folder) / "run", observer=Silent()
        )
        measured = steady_step_s(run.trace) if emulated else None
        return Trained(losses=[point.loss or float("nan") for point in run.heldout], measured_s=measured)


def _put(found: dict[str, object], name: str, make: Callable[[], object]) -> None:
    found[name] = make()


def main() -> None:
    options = options_of(__doc__, LATEST)
    options.add_argument("--part", choices=("plan", "train"), help="only this one")
    options.add_argument("--only", default="", help="figures whose name has a match of this pattern")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--most", type=int, default=1 << 30, help="figures to make at most")
    given = options.parse_args()
    torch.set_num_threads(1)
    report = Report(host=machine(), plans={}, runs={})
    if given.json.exists():
        report = msgspec.json.decode(given.json.read_bytes(), type=Report)
    todo: list[tuple[str, str, dict[str, object], Callable[[], object]]] = []
    for fleet in FLEETS:
        for way in WAYS:
            todo.append(("plan", f"{fleet} {way}", report.plans, partial(planned, fleet, way)))  # pyright: ignore[reportArgumentType]
    for seed in SEEDS:
        for fleet in FLEETS:
            for way in WAYS:
                make = partial(trained, fleet, way, seed, given.steps)
                todo.append(("train", f"{fleet} {way} {seed}", report.runs, make))  # pyright: ignore[reportArgumentType]
    left = given.most
    for part, name, found, make in todo:
        if given.part not in (None, part) or name in found or not left or not re.search(given.only, name):
            continue
        _put(found, name, make)
        left -= 1
        write_figures(given.json, report)
        print(f"{part}: {name}", file=sys.stderr, flush=True)
    _show(report)


def _show(report: Report) -> None:
    table = Table("fleet", "packed", "replicas, with micro-batches", "step", "simulated", "measured", "loss", "in time")
    for fleet in FLEETS:
        steps = {way: _step_s(report, fleet, way) for way in WAYS}
        ends = [
            step_s * len(report.runs[f"{fleet} {way} 0"].losses)
            for way, step_s in steps.items()
            if step_s is not None and f"{fleet} {way} 0" in report.runs
        ]
        for way in WAYS:
            plan, run = report.plans.get(f"{fleet} {way}"), report.runs.get(f"{fleet} {way} 0")
            step_s = steps[way]
            if plan is None or step_s is None:
                continue
            table.add_row(
                fleet,
                way,
                "; ".join(plan.replicas),
                f"{1e3 * plan.step_s:.0f} ms",
                f"{1e3 * plan.simulated_s:.0f} ms",
                "" if run is None or run.measured_s is None else f"{1e3 * run.measured_s:.0f} ms",
                "" if run is None else f"{run.losses[-1]:.4f}",
                "" if run is None else f"{_at(run.losses, min(ends) / step_s):.4f}",
            )
    Console(width=160).print(table)
    print("in time: held-out loss when the fastest of the fleet's three has done all its steps")


def _step_s(report: Report, fleet: str, way: str) -> float | None:
    plan, run = report.plans.get(f"{fleet} {way}"), report.runs.get(f"{fleet} {way} 0")
    if run is not None and run.measured_s is not None:
        return run.measured_s
    return None if plan is None else plan.simulated_s


def _at(losses: list[float], place: float) -> float:
    """Between two evaluations along a line; `place` in evaluations from the start, the first of which is 1."""
    before = min(max(int(place + 1e-9), 1), len(losses))
    after = min(before + 1, len(losses))
    return losses[before - 1] + (losses[after - 1] - losses[before - 1]) * max(0.0, min(1.0, place - before))


if __name__ == "__main__":
    main()
