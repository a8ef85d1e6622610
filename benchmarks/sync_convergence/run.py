"""Loss per step of the sync modes, the same samples for all, three seeds each.

`python benchmarks/sync_convergence/run.py [--quick] [--model gpt|resnet] [--json PATH]`. See README.md for results.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.plans import SyncPlan
from training import PERIOD, Curve, Kind, Setting

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
TIMES = HERE.parent / "sync" / "results" / "latest.json"
PICTURE = HERE.parents[1] / "docs" / "sync-convergence.png"
WORKERS = 4
MBIT = 100.0
"""The link that wall times are told for, from benchmarks/sync."""
MODES = {
    "every-step": "S-SGD",
    "local": "LSGD",
    "partial": "PLSGD-ENP",
    "outer": "DiLoCo",
    "streaming": "Streaming DiLoCo",
    "dream": "dream",
}
SHAPE: dict[Kind, tuple[int, int, int]] = {"gpt": (800, 8, 36), "resnet": (144, 16, 12)}
"""Steps, samples of one worker in a step, steps between evaluations: no multiple of the period, but for each fifth."""


class _Mode(msgspec.Struct, frozen=True):
    mode: str
    step_s: float


class _Told(msgspec.Struct, frozen=True):
    modes: list[_Mode]
    plan: SyncPlan


class _Case(msgspec.Struct, frozen=True):
    kind: Kind
    bandwidth_bit_per_s: float


class _Result(msgspec.Struct, frozen=True):
    case: _Case
    description: _Told


class _Times(msgspec.Struct, frozen=True):
    results: list[_Result]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One mode on one model; means and standard deviations over the seeds."""

    kind: Kind
    mode: str
    final_loss: float
    final_spread: float
    divergence: float
    """Mean over the evaluations."""
    sent_bytes_per_step: float
    step_s: float
    target_s: float | None
    """Wall time until the mean curve is at the target; None if it never is."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    mbit: float
    curves: list[Curve]
    rows: list[Row]
    targets: dict[str, float]


def run(settings: Sequence[Setting]) -> list[Curve]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_bytes(msgspec.json.encode(list(settings)))
        running = [
            subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(rank), str(WORKERS), f"{folder}/store", str(file)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(WORKERS)
        ]
        found: list[Curve] = []
        try:
            assert running[0].stdout is not None
            for line in running[0].stdout:
                found.append(msgspec.json.decode(line, type=Curve))
                last = found[-1]
                print(
                    f"{last.setting.kind} {last.setting.mode} seed {last.setting.seed}: {last.loss[-1]:.3f}",
                    file=sys.stderr,
                )
            for process in running:
                process.wait(60)
        finally:
            for process in running:
                process.kill()
                process.wait()
    return found


def rows_of(curves: Sequence[Curve], times: _Times) -> tuple[list[Row], dict[str, float]]:
    found: list[Row] = []
    targets: dict[str, float] = {}
    kinds: list[Kind] = list(dict.fromkeys(curve.setting.kind for curve in curves))
    for kind in kinds:
        told = _told(times, kind)
        step_s = {mode.mode: mode.step_s for mode in told.modes}
        by_mode = {m: [c for c in curves if c.setting.kind == kind and c.setting.mode == m] for m in MODES}
        by_mode = {mode: of for mode, of in by_mode.items() if of}
        # What S-SGD has reached after 60 % of the steps: everyone can get there.
        means = {
            mode: [statistics.fmean(point) for point in zip(*(c.loss for c in of), strict=True)]
            for mode, of in by_mode.items()
        }
        targets[kind] = means["every-step"][int(0.6 * len(means["every-step"]))]
        for mode, of in by_mode.items():
            finals = [curve.loss[-1] for curve in of]
            reached = _first(means[mode], of[0].steps, targets[kind])
            found.append(
                Row(
                    kind=kind,
                    mode=mode,
                    final_loss=statistics.fmean(finals),
                    final_spread=statistics.stdev(finals) if len(finals) > 1 else 0.0,
                    divergence=statistics.fmean(d for curve in of for d in curve.divergence),
                    sent_bytes_per_step=statistics.fmean(c.sent_bytes / c.setting.steps for c in of),
                    step_s=step_s[mode],
                    target_s=None if reached is None else reached * step_s[mode],
                )
            )
    return found, targets


def _first(losses: Sequence[float], steps: Sequence[int], target: float) -> float | None:
    """The step at which the curve crosses the target, between evaluations along a line."""
    for n, loss in enumerate(losses):
        if loss <= target:
            if n == 0:
                return float(steps[0])
            part = (losses[n - 1] - target) / (losses[n - 1] - loss)
            return steps[n - 1] + part * (steps[n] - steps[n - 1])
    return None


def _told(times: _Times, kind: Kind) -> _Told:
    return next(
        r.description
        for r in times.results
        if r.case.kind == kind and math.isclose(r.case.bandwidth_bit_per_s, MBIT * 1e6)
    )


def table(rows: Sequence[Row]) -> Table:
    drawn = Table("model", "mode", title=f"{WORKERS} workers, H = {PERIOD}, wall times at {MBIT:.0f} Mbit/s")
    for heading in ("held-out loss", "divergence", "MB sent a step", "ms a step", "s to target"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        drawn.add_row(
            row.kind,
            MODES[row.mode],
            f"{row.final_loss:.3f} ± {row.final_spread:.3f}",
            f"{row.divergence:.2e}",
            f"{row.sent_bytes_per_step / 1e6:.2f}",
            f"{row.step_s * 1e3:.0f}",
            "-" if row.target_s is None else f"{row.target_s:.1f}",
        )
    return drawn


def draw(curves: Sequence[Curve], path: Path) -> None:
    kinds = list(dict.fromkeys(curve.setting.kind for curve in curves))
    figure, axes = plt.subplots(2, len(kinds), figsize=(6 * len(kinds), 7), squeeze=False)
    for column, kind in enumerate(kinds):
        for mode, name in MODES.items():
            of = [c for c in curves if c.setting.kind == kind and c.setting.mode == mode]
            if not of:
                continue
            for row, points in enumerate(([c.loss for c in of], [c.divergence for c in of])):
                mean = [statistics.fmean(point) for point in zip(*points, strict=True)]
                axes[row][column].plot(of[0].steps, mean, label=name)
        axes[0][column].set(title=kind, ylabel="held-out loss of the mean model", yscale="log")
        axes[1][column].set(ylabel="divergence", xlabel="step", yscale="log")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(MODES), frameon=False)
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = options_of(__doc__, LATEST, "one seed, a fifth of the steps; no picture")
    parser.add_argument("--model", choices=("gpt", "resnet"), help="this model only; the other's curves are kept")
    parser.add_argument("--tell", action="store_true", help="run nothing: tell of the curves with the newest times")
    options = parser.parse_args()
    times = msgspec.json.decode(TIMES.read_bytes(), type=_Times)
    kinds: list[Kind] = [options.model] if options.model else ["gpt", "resnet"]
    if options.tell:
        kinds = []
    settings = [
        Setting(
            kind=kind,
            mode=mode,
            seed=seed,
            steps=SHAPE[kind][0] // (5 if options.quick else 1),
            batch=SHAPE[kind][1],
            eval_every=SHAPE[kind][2],
            plan=_told(times, kind).plan if mode == "dream" else None,
        )
        for kind in kinds
        for seed in range(1 if options.quick else 3)
        for mode in MODES
    ]
    curves = run(settings) if settings else []
    if options.json.exists() and len(kinds) < len(SHAPE):
        before = msgspec.json.decode(options.json.read_bytes(), type=Report).curves
        curves = sorted([*curves, *(c for c in before if c.setting.kind not in kinds)], key=lambda c: c.setting.kind)
    rows, targets = rows_of(curves, times)
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"), mbit=MBIT, curves=curves, rows=rows, targets=targets
    )
    write_figures(options.json, report)
    if not options.quick:
        draw(curves, PICTURE)
    Console(width=130).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
