"""Time to a target loss over a wide-area pipeline, on a scaled-down twin of Protocol NanoGPT.

`python benchmarks/wan_loss/run.py [--steps N] [--seeds N] [--only NAME ...] [--most N] [--publish] [--json PATH]`

T = steps to the target x seconds per step. Steps come from trainings in one process with the numbers of each plan;
seconds from the simulator, under the original's meter and over TCP. Every training is written when it is done, and a
run that is given again trains only what is missing. `--publish` draws the picture of docs/wan.md and writes the losses
that `isthmus plan --loss-budget` expects.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import matplotlib as mpl
import msgspec
import torch
from networks import NETWORKS, Network, Step
from rich.console import Console
from rich.table import Table
from step_times import Times, times_of
from twin import STAGES, TOKENS, VARIANTS, Variant

from isthmus.expected_loss import MEASURED_FILE, MeasuredLosses
from training import Trained, train

mpl.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

K = TypeVar("K")
HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
PICTURE = HERE.parents[1] / "docs" / "wan-loss.png"
EVERY = 10
TARGET_AT = 0.5
"""The target is the dense model's mean held-out loss after this share of the steps."""


class Report(msgspec.Struct, kw_only=True):
    host: str = ""
    times: dict[str, Times] = {}
    runs: list[Trained] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train: a variant's numbers under an order of computation."""

    name: str
    variant: str
    step: dict[Network, Step]
    steps: tuple[float, ...]
    """To the target, by seed; inf where the training ended above it."""
    final: tuple[float, ...]
    """Held-out loss after all steps, by seed."""
    gaps: tuple[float, ...]
    """Of that loss to the dense model's of the same seed, as a share of it."""

    def total_s(self, network: Network = "tcp") -> float:
        return self.step[network].seconds * statistics.fmean(self.steps)


def steps_to(run: Trained, target: float) -> float:
    """Between two losses of the curve, by the line through them."""
    step, loss = 0, math.inf
    for number, after in enumerate(run.curve, 1):
        if after <= target:
            share = (loss - target) / (loss - after) if math.isfinite(loss) else 1.0
            return step + share * (number * run.every - step)
        step, loss = number * run.every, after
    return math.inf


def loss_after(run: Trained, seconds: float, step_s: float) -> float:
    """The last loss of the curve that is known by then."""
    points = int(seconds / step_s / run.every)
    return run.curve[min(points, len(run.curve)) - 1] if points and run.curve else math.nan


def rows_of(report: Report, steps: int) -> list[Row]:
    by_variant: dict[str, list[Trained]] = {}
    for run in report.runs:
        if run.steps == steps:
            by_variant.setdefault(run.variant, []).append(run)
    dense = by_variant["dense"]
    finals = {run.seed: run.final for run in dense}
    target = statistics.fmean(r.curve[int(len(r.curve) * TARGET_AT) - 1] for r in dense)
    found: list[Row] = []
    for variant in VARIANTS:
        if not (runs := by_variant.get(variant.name, [])):
            continue
        for order, step in report.times[variant.name].steps.items():
            found.append(
                Row(
                    name=variant.name if order == "delayed" else f"{variant.name}, {order}",
                    variant=variant.name,
                    step=step,
                    steps=tuple(steps_to(r, target) for r in runs),
                    final=tuple(r.final for r in runs),
                    gaps=tuple(r.final / finals[r.seed] - 1 for r in runs if r.seed in finals),
                )
            )
    return found


def show(report: Report, steps: int) -> None:
    rows = {row.name: row for row in rows_of(report, steps)}
    peer = rows["dense, 1f1b"]
    budget_s = rows["dense, deep"].step["tcp"].seconds * steps / 4
    table = Table(
        *("", "step, meter (micro-batches)", "step, TCP", "steps to target", "T, meter", "T, TCP", "of 1f1b's"),
        *(f"loss after {steps} steps", "gap", f"loss after {budget_s:.0f} s"),
        title=f"{steps} steps of {TOKENS} tokens",
    )
    for row in rows.values():
        runs = [r for r in report.runs if (r.variant, r.steps) == (row.variant, steps)]
        timed = statistics.fmean(loss_after(r, budget_s, row.step["tcp"].seconds) for r in runs)
        reached = math.isfinite(row.total_s())
        table.add_row(
            row.name,
            *(f"{row.step[network].seconds:.3f} s ({row.step[network].micro_batches})" for network in NETWORKS),
            _spread(row.steps, 0, "not reached"),
            *(f"{row.total_s(network):.0f} s" if reached else "" for network in NETWORKS),
            f"{row.total_s() / peer.total_s():.3f}" if reached else "",
            _spread(row.final, 3, "diverged"),
            _spread(tuple(100 * gap for gap in row.gaps), 2, "") + " %",
            f"{timed:.3f}",
        )
    console = Console(width=180)
    console.print(table)
    for network in NETWORKS:
        least_s, best = min((row.total_s(network), row.name) for row in rows.values())
        others = [rows[name] for name in ("dense, 1f1b", "subspace 6.4x, 1f1b") if name in rows]
        against = " and ".join(f"1/{o.total_s(network) / least_s:.1f} of {o.name}" for o in others)
        console.print(f"{network}: best T {least_s:.0f} s, {best}: {against}")
    console.print(gaps(report, steps))


def gaps(report: Report, steps: int) -> Table:
    """Over training: each variant's loss beside the dense model's of the same seed, in the mean."""
    every = steps // 4
    table = Table("", *(f"{every * k} steps" for k in range(1, 5)), title="Loss gap over training")
    dense = {r.seed: r.curve for r in report.runs if (r.variant, r.steps) == ("dense", steps)}
    for variant in VARIANTS:
        runs = [r for r in report.runs if (r.variant, r.steps) == (variant.name, steps) and r.seed in dense]
        if runs and all(len(r.curve) == len(dense[r.seed]) for r in runs):
            at = [len(runs[0].curve) * k // 4 - 1 for k in range(1, 5)]
            means = [statistics.fmean(r.curve[i] / dense[r.seed][i] - 1 for r in runs) for i in at]
            table.add_row(variant.name, *(f"{mean:+.2%}" for mean in means))
    return table


def _spread(values: tuple[float, ...], digits: int, otherwise: str) -> str:
    if not all(map(math.isfinite, values)):
        return otherwise
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.{digits}f}"


def draw(rows: list[Row], path: Path) -> None:
    """T by row, the longest on top."""
    reached = sorted((r for r in rows if math.isfinite(r.total_s())), key=lambda r: r.total_s(), reverse=True)
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(reached) + 1))
    axes.barh([r.name for r in reversed(reached)], [r.total_s() for r in reversed(reached)], color="#4878a8")
    axes.set_xscale("log")
    axes.set_xlabel("T: seconds to the target loss over TCP")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def exponent_of(dense: list[Trained]) -> float:
    """x of a loss that falls as steps ** -x between half of the steps and all."""
    return statistics.fmean(math.log2(run.curve[len(run.curve) // 2 - 1] / run.curve[-1]) for run in dense)


def measured_losses(rows: list[Row], dense: list[Trained], before: MeasuredLosses) -> MeasuredLosses:
    """What plans expect from now on: the mean gap of each variant, what was not trained as before."""
    steps = dense[0].steps
    gaps = {row.variant: statistics.fmean(row.gaps) for row in rows if all(map(math.isfinite, row.final))}
    seeds = max(len(row.gaps) for row in rows)

    def by_number(prefix: str, known: Mapping[float, float]) -> dict[float, float]:
        found = {float(v.removeprefix(prefix)[:-1]): gap for v, gap in gaps.items() if v.startswith(prefix)}
        return _rising(dict(sorted({**known, **found}.items())))

    codecs = _rising({name: gaps.get(name, before.codecs[name]) for name in ("bf16", "int8", "int4")})
    return MeasuredLosses(
        measured_on=f"a GPT of {STAGES} blocks after {steps} steps, {seeds} {'seed' if seeds == 1 else 'seeds'}",
        exponent=exponent_of(dense),
        codecs=codecs,
        topk=by_number("uniform top-K ", before.topk),
        subspace=by_number("subspace ", before.subspace),
        residual=by_number("residual ", before.residual),
    )


def _rising(values: dict[K, float]) -> dict[K, float]:
    """None below 0, and none below that of something milder, which comes before it."""
    highest = itertools.accumulate(values.values(), max, initial=0.0)
    return dict(zip(values, itertools.islice(highest, 1, None), strict=True))


def publish(report: Report, steps: int) -> None:
    rows = rows_of(report, steps)
    draw(rows, PICTURE)
    path = Path(str(MEASURED_FILE))
    dense = [run for run in report.runs if (run.variant, run.steps) == ("dense", steps)]
    before = msgspec.json.decode(path.read_bytes(), type=MeasuredLosses)
    write_figures(path, measured_losses(rows, dense, before))


def main() -> None:
    parser = options_of(__doc__, LATEST)
    parser.add_argument("--steps", type=int, default=240, help="of each training; each length has a table of its own")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each variant")
    variants = [variant.name for variant in VARIANTS]
    parser.add_argument("--only", nargs="+", choices=variants, metavar="NAME", help="train these variants")
    parser.add_argument("--most", type=int, help="train so many and end; 0: show what there is")
    parser.add_argument("--publish", action="store_true", help="what docs/wan.md shows and plans expect is this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path: Path = options.json
    report = msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report()
    report.host = machine()
    chosen = [v for v in VARIANTS if not options.only or v.name in options.only]
    missing = [(v, seed) for seed in range(options.seeds) for v in chosen if not known(report, v, seed, options.steps)]
    for variant, seed in missing[: options.most]:
        complete(report, variant, seed, options.steps, path)
    if options.most and len(missing) > options.most:
        return
    if not any((r.variant, r.steps) == ("dense", options.steps) for r in report.runs):
        sys.exit(f"no table: {path} has no training of the dense model over {options.steps} steps")
    show(report, options.steps)
    if options.publish:
        publish(report, options.steps)


def known(report: Report, variant: Variant, seed: int, steps: int) -> bool:
    return any((r.variant, r.seed, r.steps) == (variant.name, seed, steps) for r in report.runs)


def complete(report: Report, variant: Variant, seed: int, steps: int, path: Path) -> None:
    """Train, and write it."""
    if variant.name not in report.times:
        report.times[variant.name] = times_of(variant)
    found = train(variant, seed, steps, EVERY)
    report.runs.append(found)
    print(f"{variant.name}, seed {seed}: {found.final:.4f} after {found.trained_s:.0f} s", flush=True)
    write_figures(path, report)


if __name__ == "__main__":
    main()
