"""Plans that compress slow replicas alone, beside plans that compress all messages or none: loss per second.

`python benchmarks/mixed/run.py [--part plan|train|measure] [--only PATTERN] [--most N] [--json PATH]`.
What came out: README.md.

Figures that the results file holds are not made again. `--most` bounds how many are made at once, `--only` names them.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import isthmus
from isthmus.api.observer import Silent
from isthmus.expected_loss import increase_of
from isthmus.job import load_job, prepare
from isthmus.plans import Plan, load_plan, save_plan
from isthmus.report.comparison import replica_line
from isthmus.trace import steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import chosen, machine, options_of, write_figures
from training import train

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
FLEETS = ("lan-and-homes", "lan-and-tablets", "site-and-branch", "workstation-and-dsl")
MEASURED = ("lan-and-homes", "site-and-branch")
"""Fleets on which the plans are run by processes over emulated links."""
SLOWER = 4.0
"""Times by which links and devices of such a run are slowed, so that two cores compute all devices in time. Its step is
divided by it."""
WAYS: dict[str, dict[str, object]] = {
    "none": {"compression": None},
    "all int4": {"compression": {"method": "int4"}},
    "mixed": {},
}
"""What is changed in job.toml, by the way of packing."""
SIMULATED, EMULATED, EVERY = 34, 32, 16
"""Steps of a simulation, two periods and the steps around them; of a run over processes; and between two held-out
losses."""
SEEDS = (0, 1, 2)
TARGET_AT = 2 / 3
"""The target is the loss that plans without codecs have after this part of their steps."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    step_s: float
    """By the closed form."""
    simulated_s: float
    gap: float
    """Proven."""
    increase: float
    """Expected, of the loss."""
    replicas: list[str]


class Report(msgspec.Struct, kw_only=True):
    host: str
    plans: dict[str, Planned]
    """By fleet and way."""
    runs: dict[str, list[float]]
    """Held-out losses, every EVERY steps, by fleet, way and seed."""
    measured_s: dict[str, float]
    """Steps of runs over processes, by fleet and way."""


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
        increase=increase_of(plan.replicas),
        replicas=list(map(replica_line, plan.replicas)),
    )


def trained(fleet: str, way: str, seed: int) -> list[float]:
    job = load_job(HERE / "job.toml", _overrides(fleet, way) | {"training.seed": seed})
    return train(prepare(job), _plan(fleet, way), EVERY)


def measured(fleet: str, way: str) -> float:
    """A step over emulated links."""
    with tempfile.TemporaryDirectory() as folder:
        slowed = Path(folder) / "fleet.toml"
        slowed.write_text(_slowed((HERE / "fleets" / f"{fleet}.toml").read_text()))
        changed = {"fleet": str(slowed), **WAYS[way], "training.steps": EMULATED, "training.eval_every": EMULATED}
        run = isthmus.train(
            HERE / "job.toml",
            plan=_plan(fleet, way),
            overrides={**changed, "runtime.emulate": True},
            run=Path(folder) / "run",
            observer=Silent(),
        )
        return steady_step_s(run.trace) / SLOWER


def _slowed(fleet: str) -> str:
    """Speeds, bandwidths and latencies of a fleet file."""

    def other(found: re.Match[str]) -> str:
        field, number, unit = found.groups()
        return f'{field} = "{float(number) * SLOWER ** (1 if field == "latency" else -1):g} {unit}"'

    return re.sub(r'(compute|bandwidth|latency) = "([\d.]+) ([^"]+)"', other, fleet)


class Todo(NamedTuple):
    part: str
    name: str
    make: Callable[[], object]


def todo() -> Iterator[Todo]:
    pairs = [(fleet, way) for fleet in FLEETS for way in WAYS]
    yield from (Todo("plan", f"{fleet} {way}", partial(planned, fleet, way)) for fleet, way in pairs)
    for seed in SEEDS:
        yield from (Todo("train", f"{f} {way} {seed}", partial(trained, f, way, seed)) for f, way in pairs)
    yield from (Todo("measure", f"{f} {way}", partial(measured, f, way)) for f, way in pairs if f in MEASURED)


def main() -> None:
    options = options_of(__doc__, LATEST)
    options.add_argument("--part", choices=("plan", "train", "measure"), help="only this one")
    options.add_argument("--only", default="", help="figures whose name has a match of this pattern")
    options.add_argument("--most", type=int, default=1 << 30, help="figures to make at most")
    given = options.parse_args()
    torch.set_num_threads(1)
    report = Report(host=machine(), plans={}, runs={}, measured_s={})
    if given.json.exists():
        report = msgspec.json.decode(given.json.read_bytes(), type=Report)
    found: dict[str, dict[str, object]] = {"plan": report.plans, "train": report.runs, "measure": report.measured_s}  # pyright: ignore[reportAssignmentType]
    left = given.most
    for part, name, make in chosen(options, "--only", given.only, todo(), key=lambda item: item[1]):
        if given.part not in (None, part) or name in found[part] or not left:
            continue
        found[part][name] = make()
        left -= 1
        write_figures(given.json, report)
        print(f"{part}: {name}", file=sys.stderr, flush=True)
    show(report)


class Trained(NamedTuple):
    """A plan's trainings, one entry for each seed."""

    final: list[float]
    steps: list[float]
    """To the target; inf where it was not reached."""
    timed: list[float]
    """Held-out loss when the fleet's fastest plan has done all its steps."""


def show(report: Report) -> None:
    plans = Table("fleet", "packed", "replicas, with micro-batches", "step", "simulated", "measured", "gap", "expected")
    losses = Table("fleet", "packed", "loss after all steps", "steps to target", "time to target", "loss in equal time")
    for fleet in FLEETS:
        ways = [way for way in WAYS if f"{fleet} {way}" in report.plans]
        for way in ways:
            plan, measured_s = report.plans[f"{fleet} {way}"], report.measured_s.get(f"{fleet} {way}")
            plans.add_row(
                *(fleet, way, "; ".join(plan.replicas), _ms(plan.step_s), _ms(plan.simulated_s)),
                *("" if measured_s is None else _ms(measured_s), f"{plan.gap:.0%}", f"{plan.increase:+.2%}"),
            )
        for way, runs in _trained(report, fleet).items():
            step_s = report.plans[f"{fleet} {way}"].simulated_s
            losses.add_row(
                *(fleet, way, _mean(runs.final), _mean(runs.steps, 0)),
                *(f"{_mean([step_s * steps for steps in runs.steps], 1)} s", _mean(runs.timed)),
            )
    console = Console(width=170)
    console.print(plans)
    if losses.row_count:
        console.print(losses)
        print(f"target: mean loss of the fleet's plan without codecs after {TARGET_AT:.0%} of its steps")


def _trained(report: Report, fleet: str) -> dict[str, Trained]:
    """Of ways that were trained, where the one without codecs was."""
    curves = {
        way: [c for seed in SEEDS if (c := report.runs.get(f"{fleet} {way} {seed}")) is not None]
        for way in WAYS
        if f"{fleet} {way} {SEEDS[0]}" in report.runs and f"{fleet} {way}" in report.plans
    }
    if "none" not in curves:
        return {}
    target = statistics.fmean(c[int(len(c) * TARGET_AT) - 1] for c in curves["none"])
    steps_s = {way: report.plans[f"{fleet} {way}"].simulated_s for way in curves}
    shortest_s = min(steps_s.values())
    return {
        way: Trained(
            [c[-1] for c in some],
            [_steps_to(c, target) for c in some],
            [_at(c, len(c) * shortest_s / steps_s[way]) for c in some],
        )
        for way, some in curves.items()
    }


def _steps_to(losses: list[float], target: float) -> float:
    """Along a line between two evaluations."""
    for k, loss in enumerate(losses):
        if loss <= target:
            share = (losses[k - 1] - target) / (losses[k - 1] - loss) if k else 1.0
            return EVERY * (k + share)
    return float("inf")


def _at(losses: list[float], place: float) -> float:
    """Between two evaluations along a line; `place` in evaluations from the start, the first of which is 1."""
    before = min(max(int(place + 1e-9), 1), len(losses))
    after = min(before + 1, len(losses))
    return losses[before - 1] + (losses[after - 1] - losses[before - 1]) * max(0.0, min(1.0, place - before))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _mean(values: list[float], digits: int = 3) -> str:
    """And the standard deviation."""
    if float("inf") in values or len(values) < 2:
        return ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{statistics.fmean(values):.{digits}f} +- {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
