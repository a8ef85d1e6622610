"""Replicas that never wait, beside those that do: losses, goodput under faults, and the cost of a stop.

`python benchmarks/decoupled/run.py [--part losses|goodput|real|stop|script] [--only PATTERN] [--most N] [--json PATH]`.
What came out: README.md.

Figures that the results file holds are not made again. `--most` bounds how many are made at once, `--only` names them.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from goodput import Goodput, full_speed_of, goodput
from jobs import FLEET, job_of
from losses import Curve, decoupled, waiting
from real import RealRun, real
from rich.console import Console
from rich.table import Table
from script import Script, script
from stopped import Stopped, stopped

from isthmus.fleet import resolve_fleet

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
SEEDS = (0, 1, 2)
WAITING = ("every-step", "local", "dreamddp", "outer")
CODECS = ("none", "int4", "sparse2bit")
STEPS, HOURS = 240, 4.0
BASE = "every-step"


class Report(msgspec.Struct, kw_only=True):
    host: str
    curves: dict[str, Curve]
    """By mode and seed."""
    goodputs: dict[str, Goodput]
    stops: dict[str, Stopped]
    reals: dict[str, RealRun] = {}
    """By mode and seed."""
    scripts: dict[str, Script] = {}
    """By mode, and the worker that was killed."""


Act = Callable[[], None]
Found = TypeVar("Found")


def _losses(report: Report, steps: int) -> Iterator[tuple[str, Act]]:
    for seed in SEEDS:
        for mode in WAITING:
            yield (
                name := f"{mode} {seed}",
                partial(_put, report.curves, name, lambda m=mode, s=seed: waiting(job_of(m, seed=s, steps=steps))),
            )
        for codec in CODECS:
            ratio = 16.0 if codec == "sparse2bit" else 1.0
            make = partial(job_of, "decoupled", seed=seed, steps=steps, codec=codec, ratio=ratio)
            yield (
                name := f"decoupled {codec} {seed}",
                partial(_put, report.curves, name, lambda j=make: decoupled(j())),
            )


def _goodputs(report: Report, steps: int) -> Iterator[tuple[str, Act]]:
    names = resolve_fleet(str(FLEET)).names
    for mode in ("decoupled", *WAITING):
        for seed in SEEDS:
            name = f"{mode} {seed}"
            make = lambda m=mode, s=seed: goodput(m, s, HOURS, full_speed_of(), names)  # noqa: E731
            yield name, partial(_put, report.goodputs, name, make)


def _reals(report: Report, steps: int) -> Iterator[tuple[str, Act]]:
    for seed in SEEDS:
        for mode in ("decoupled", *WAITING):
            name = f"{mode} {seed}"
            yield name, partial(_put, report.reals, name, partial(real, mode, seed))


def _stops(report: Report, steps: int) -> Iterator[tuple[str, Act]]:
    yield "fast-0", partial(_put, report.stops, "fast-0", lambda: stopped("fast-0"))


def _scripts(report: Report, steps: int) -> Iterator[tuple[str, Act]]:
    for mode, killed in (("decoupled", None), ("decoupled", 0), ("decoupled", 3), ("local", None)):
        name = mode if killed is None else f"{mode} {killed}"
        yield name, partial(_put, report.scripts, name, partial(script, mode, killed))


def _put(found: dict[str, Found], name: str, make: Callable[[], Found]) -> None:
    if name not in found:
        found[name] = make()


def main() -> None:
    options = options_of(__doc__, LATEST)
    options.add_argument("--part", choices=("losses", "goodput", "real", "stop", "script"), help="only this one")
    options.add_argument("--only", default="", help="figures whose name has a match of this pattern")
    options.add_argument("--steps", type=int, default=STEPS, help="of the runs with losses")
    options.add_argument("--most", type=int, default=1 << 30, help="figures to make at most")
    given = options.parse_args()
    torch.set_num_threads(1)
    report = Report(host=machine(), curves={}, goodputs={}, stops={})
    if given.json.exists():
        report = msgspec.json.decode(given.json.read_bytes(), type=Report)
    parts = {
        "losses": (_losses, report.curves),
        "goodput": (_goodputs, report.goodputs),
        "real": (_reals, report.reals),
        "stop": (_stops, report.stops),
        "script": (_scripts, report.scripts),
    }
    left, matched = given.most, False
    for part, (items, known) in parts.items():
        if given.part not in (None, part):
            continue
        for name, act in items(report, given.steps):
            if not re.search(given.only, name):
                continue
            matched = True
            if name in known or not left:
                continue
            act()
            left -= 1
            write_figures(given.json, report)
            print(f"{part}: {name}", file=sys.stderr, flush=True)
    if not matched:
        options.error(f"--only: got {given.only!r}, which matches no figure")
    _show(report)


def _show(report: Report) -> None:
    console = Console(width=120)
    table = Table(
        "mode", "loss", "above every-step", "loss when every-step ends", "changes sent", title="held-out loss"
    )
    base = {seed: report.curves.get(f"{BASE} {seed}") for seed in SEEDS}
    for mode in (*WAITING, *(f"decoupled {codec}" for codec in CODECS)):
        pairs = [
            (one, report.curves[f"{mode} {seed}"])
            for seed, one in base.items()
            if one and f"{mode} {seed}" in report.curves
        ]
        if not pairs:
            continue
        losses = [curve.losses[-1] for _, curve in pairs]
        gaps = [curve.losses[-1] / b.losses[-1] - 1 for b, curve in pairs]
        timed = [curve.at_second(b.seconds[-1]) for b, curve in pairs]
        seen = [loss for loss in timed if loss is not None]
        table.add_row(
            mode,
            f"{statistics.fmean(losses):.4f}",
            f"{100 * statistics.fmean(gaps):+.2f} % ({100 * min(gaps):+.2f} .. {100 * max(gaps):+.2f})",
            f"{statistics.fmean(seen):.4f}" if seen else "",
            f"{statistics.fmean(c.bytes for _, c in pairs) / 1e6:.1f} MB" if pairs[0][1].bytes else "",
        )
    console.print(table)
    table = Table("mode", "undisturbed", "with faults", title=f"goodput over {HOURS:g} h, simulated")
    for mode in ("decoupled", *WAITING):
        found = [report.goodputs[f"{mode} {s}"] for s in SEEDS if f"{mode} {s}" in report.goodputs]
        if found:
            undisturbed = statistics.fmean(one.undisturbed for one in found)
            disturbed = statistics.fmean(one.disturbed for one in found)
            table.add_row(mode, f"{100 * undisturbed:.1f} %", f"{100 * disturbed:.1f} %")
    console.print(table)
    console.print(_reals_table(report.reals))
    for name, stop in report.stops.items():
        console.print(
            f"{name} stopped for a minute: the others' steps {100 * stop.cost:+.2f} %; merged again after "
            f"{stop.back_after_s:.1f} s; replay with the same bits: {stop.same_bits}"
        )
    for name, found in report.scripts.items():
        mode, _, killed = name.partition(" ")
        cost = (
            f"worker {killed} killed: the others' steps {-100 * found.cost(killed):+.2f} %" if killed else "undisturbed"
        )
        console.print(f"script, {mode}, {cost}; held-out losses {sorted(set(found.losses.values()))}")


def _reals_table(reals: dict[str, RealRun]) -> Table:
    table = Table(
        "mode",
        "runs",
        "goodput",
        "time",
        "held-out loss",
        f"above {BASE}",
        "training loss when decoupled ends",
        "cores busy",
        title="real runs, two devices stopped for some seconds each",
    )
    for mode in ("decoupled", *WAITING):
        runs = {seed: reals[f"{mode} {seed}"] for seed in SEEDS if f"{mode} {seed}" in reals}
        if not runs:
            continue
        gaps = [run.loss / reals[f"{BASE} {s}"].loss - 1 for s, run in runs.items() if f"{BASE} {s}" in reals]
        ends = [run.trained_at(reals[f"decoupled {s}"].seconds) for s, run in runs.items() if f"decoupled {s}" in reals]
        known = [loss for loss in ends if loss is not None]
        table.add_row(
            mode,
            str(len(runs)),
            f"{100 * statistics.fmean(r.goodput for r in runs.values()):.1f} %",
            f"{statistics.fmean(r.seconds for r in runs.values()):.1f} s",
            f"{statistics.fmean(r.loss for r in runs.values()):.4f}",
            f"{100 * statistics.fmean(gaps):+.2f} % ({100 * min(gaps):+.2f} .. {100 * max(gaps):+.2f})" if gaps else "",
            f"{statistics.fmean(known):.3f}" if known else "",
            f"{100 * statistics.fmean(r.busy for r in runs.values()):.0f} %",
        )
    return table


if __name__ == "__main__":
    main()
