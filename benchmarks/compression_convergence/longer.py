"""Losses over thousands of steps, dense and under top-K: FusionLLM's Fig. 8.

`python benchmarks/compression_convergence/longer.py [--only MODEL] [--steps N] [--ratio R] [--json PATH]`

The ResNet and the GPT of `models.py`, one seed, a constant learning rate after warm-up, so that a curve does not depend
on where it ends. All methods advance together from one point of the curve to the next, and the file is written at every
point: a run that is stopped leaves equally long curves.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from pipeline import Stages
from rich.console import Console
from rich.table import Table
from run import RATIO, planned

from isthmus.data import SampleOrder, load_dataset
from isthmus.experiments import LearningRate
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan
from models import CASES, Case

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LONGER = Path(__file__).parent / "results" / "longer.json"
METHODS = ("dense", "adatopk", "uniform")
POINTS = (100, 200, 400, 800, 1200, 1600, 2000, 2500, 3000)
WINDOW = 50
SEED = 0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    training_loss: float
    """Mean of the last 50 steps, with values packed: the paper's curve."""
    loss: float
    """Held out, of the model as it is."""
    packed_loss: float
    """Held out, with values packed as in training."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    method: str
    points: tuple[Point, ...]
    trained_s: float


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    ratio: float
    curves: tuple[Curve, ...]


def longer(case: Case) -> Case:
    """Half as many micro-batches, twice as large: the same batch in less time."""
    return dataclasses.replace(case, micro_batches=case.micro_batches // 2)


class Training:
    """One model under one method."""

    def __init__(self, case: Case, prepared: Prepared, plan: Plan, method: str) -> None:
        job = prepared.job
        self.model, self.method, self._job = case.name, method, job
        self._stages, self._columns = Stages(prepared, plan), list(prepared.samples.columns)
        self._data, others = load_dataset(job.data, "train"), load_dataset(job.data, "heldout")
        size = job.micro_batch_size
        count = min(job.training.eval_samples, prepared.samples.heldout) // size
        self._held_out = [others.batch(range(k * size, (k + 1) * size), self._columns) for k in range(count)]
        self._order, self._losses, self._points = SampleOrder(len(self._data), SEED, True), list[float](), list[Point]()
        self._trained_s = 0.0

    def advance(self, steps: int) -> None:
        """Train up to `steps` steps in all and measure there."""
        started, t, size = time.perf_counter(), self._job.training, self._job.micro_batch_size
        for step in range(len(self._losses), steps):
            starts = [step * t.batch_size + m * size for m in range(self._job.micro_batches)]
            samples = [self._order.indices(start, size) for start in starts]
            batches = [self._data.batch(its, self._columns) for its in samples]
            self._losses.append(self._stages.step(step, batches, [its.tolist() for its in samples]))
        self._trained_s += time.perf_counter() - started
        self._points.append(
            Point(
                steps=steps,
                training_loss=statistics.fmean(self._losses[-WINDOW:]),
                loss=self._stages.evaluate(self._held_out, packed=False),
                packed_loss=self._stages.evaluate(self._held_out, packed=True),
            )
        )

    def curve(self) -> Curve:
        points = tuple(self._points)
        return Curve(model=self.model, method=self.method, points=points, trained_s=self._trained_s)


def trainings(case: Case, steps: int, ratio: float) -> list[Training]:
    job = longer(case).job(SEED, steps)
    rate = LearningRate(schedule="constant", warmup_steps=50)
    prepared = prepare(msgspec.structs.replace(job, learning_rate=rate))
    return [Training(case, prepared, planned(case, prepared, method, ratio), method) for method in METHODS]


def frequencies(case: Case) -> float:
    """Nats a byte of a model that knows nothing but how often each byte comes."""
    data = load_dataset(case.data, "train")
    columns = data.batch(range(min(len(data), 5000)), ["input_ids"])["input_ids"]
    shares = torch.bincount(columns.flatten()).double() / columns.numel()
    return float(-torch.special.xlogy(shares, shares).sum())


def table(found: Curves) -> Table:
    drawn = Table("model", "steps", title=f"Losses over training, ratio {found.ratio:g}: training / held out / packed")
    for method in METHODS:
        drawn.add_column(method, justify="right")
    for model in dict.fromkeys(c.model for c in found.curves):
        ours = [c for c in found.curves if c.model == model]
        for points in zip(*(c.points for c in ours), strict=True):
            figures = (f"{p.training_loss:.4f} / {p.loss:.4f} / {p.packed_loss:.4f}" for p in points)
            drawn.add_row(model, f"{points[0].steps:,}", *figures, end_section=points[0] is ours[0].points[-1])
    return drawn


def main() -> int:
    parser = options_of(__doc__, LONGER)
    names = tuple(case.name for case in CASES[:2])
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="these models; both")
    parser.add_argument("--steps", type=int, default=POINTS[-1], help="the longest curve (default 3000)")
    parser.add_argument("--ratio", type=float, default=RATIO, help="what top-K leaves out (default 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = [t for case in CASES if case.name in options.only for t in trainings(case, options.steps, options.ratio)]
    found = None
    for steps in sorted({p for p in POINTS if p < options.steps} | {options.steps}):
        for training in models:
            training.advance(steps)
        found = Curves(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            host=machine(),
            ratio=options.ratio,
            curves=tuple(t.curve() for t in models),
        )
        write_figures(options.json, found)
        print(f"{steps:,} steps", file=sys.stderr)
    assert found is not None
    Console(width=150).print(table(found))
    if "GPT" in options.only:
        print(f"the bytes' frequencies alone: {frequencies(CASES[1]):.2f} nats a byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
