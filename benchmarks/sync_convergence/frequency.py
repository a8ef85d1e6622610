"""DreamDDP's Fig. 13 and 14: what a step takes and how training goes at H = 3, 5 and 10, with and without fillings; and
Lemma 4's bound beside the divergence that is measured.

`python benchmarks/sync_convergence/frequency.py [--workers 8 32] [--seeds 2] [--steps 150] [--json PATH]`

Step times are the simulator's, on DreamDDP's profiles and the shapes of its models. Training is real: all workers'
replicas of a residual network of 8 layers on handwritten digits, stacked in one process, by plain SGD (the lemma is of
SGD) on samples of their own, averaged layer by layer as each plan says.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

sys.path.insert(0, str(Path(__file__).parents[1] / "sync"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dream"))

from published import cases, model_of  # pyright: ignore[reportMissingImports]
from shapes import problem_of  # pyright: ignore[reportMissingImports]

from isthmus.planners.sync import plan_sync
from isthmus_testing.sync_modes import SyncChoices, simulate_sync

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "frequency.json"
PERIODS = (3, 5, 10)
RATE, BATCH, TRAINED = 0.1, 8, 1500
EVERY = 3
"""Steps between evaluations."""
WIDTH, BLOCKS = 64, 6
WIRE = 3.0
"""Averaging everything takes so many steps' computation: at H = 3 the wire is hardly idle, at H = 10 it mostly is."""
METHODS = {
    "LSGD": None,
    "PLSGD-ENP": ("equal-number", 1.0),
    "DreamDDP, not filled": ("dream-dfs", 1.0),
    "DreamDDP": ("dream-dfs", 0.0),
}
"""Sync planner and the share of an iteration that fillings leave free."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says of one profile."""

    name: str
    workers: str
    step_s: dict[str, float]
    filled: dict[int, int]
    """Averages per period that fillings add, by H."""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the seeds."""

    workers: int
    method: str
    period: int
    averages: float
    """How often a layer is averaged in a period, in the mean."""
    loss: float
    """Held out, of the mean model at the end."""
    target_step: int | None
    """Where the training loss of the mean model is first at the target."""
    divergence: float
    largest_divergence: float
    bound: float
    """Lemma 4: 4 H^2 eta^2 G^2, with the largest squared gradient of the run for G^2."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    steps: list[Step]
    trained: list[Trained]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden)) / BLOCKS**0.5
        return self.last(hidden)


def simulated() -> list[Step]:
    found: list[Step] = []
    for name, workers, backward_s, average_s in cases():
        if "100 MB/s" in name or "extrapolated" in workers:
            continue
        model = model_of(backward_s, average_s)
        step_s = {
            "s-sgd": simulate_sync("s-sgd", model, SyncChoices()),
            "asc-wfbp": simulate_sync("asc-wfbp", model, SyncChoices()),
        }
        filled: dict[int, int] = {}
        for period in PERIODS:
            at = replace(model, period=period)
            step_s[f"local, {period}"] = simulate_sync("local", at, SyncChoices())
            for fill in (False, True):
                problem = replace(problem_of(backward_s, average_s, period, overlap=False), spare=0.0 if fill else 1.0)
                plan = plan_sync("dream-dfs", problem)
                taken_s = simulate_sync("dreamddp", at, SyncChoices(plan=plan))
                step_s[f"dreamddp, {period}{', filled' if fill else ''}"] = taken_s
                filled[period] = sum(len(iteration.filled) for iteration in plan.iterations)
        found.append(Step(name=name, workers=workers, step_s=step_s, filled=filled))
    return found


def due(method: str, period: int, layers: Sequence[str]) -> list[frozenset[str]]:
    """The layers that each iteration of a period averages after its update."""
    chosen = METHODS[method]
    if chosen is None:
        return [frozenset[str]()] * (period - 1) + [frozenset(layers)]
    compute = [1.0 / len(layers)] * len(layers)
    averages = [1.5 * WIRE / len(layers)] * len(layers)  # a forward takes half the backward
    problem = replace(problem_of(compute, averages, period, overlap=False), spare=chosen[1], layers=tuple(layers))
    plan = plan_sync(chosen[0], problem)
    return [frozenset(plan.averaged(step)) for step in range(period)]


class Replicas:
    """All workers' models, stacked."""

    def __init__(self, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = Residual()
        self.layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in self.module.named_parameters()))
        self.weights = {n: p.detach().expand(workers, *p.shape).clone() for n, p in self.module.named_parameters()}
        pixels, labels = load_digits(return_X_y=True)
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.images = (torch.tensor(pixels, dtype=torch.float32) / 16)[shuffled]
        self.labels = torch.tensor(labels)[shuffled]
        self._drawn = torch.Generator().manual_seed(seed)
        self._gradients = vmap(grad_and_value(self.loss))

    def loss(self, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(self.module, weights, (images,)), labels)

    def step(self, averaged: frozenset[str], *, gradients: bool = False) -> float:
        """One step of all. Returns the largest squared norm of a worker's gradient."""
        workers = len(next(iter(self.weights.values())))
        chosen = torch.randint(TRAINED, (workers, BATCH), generator=self._drawn)
        found, _ = self._gradients(self.weights, self.images[chosen], self.labels[chosen])
        for name, weight in self.weights.items():
            weight -= RATE * (found[name].mean(0, keepdim=True) if gradients else found[name])
            if name.rpartition(".")[0] in averaged:
                weight.copy_(weight.mean(0, keepdim=True).expand_as(weight))
        return float(torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0).max())

    def divergence(self) -> float:
        """Gamma of the paper's section 3.4."""
        return sum(float((w - w.mean(0)).square().flatten(1).sum(1).mean()) for w in self.weights.values())

    def mean_loss(self, part: slice) -> float:
        mean = {name: weight.mean(0) for name, weight in self.weights.items()}
        return float(self.loss(mean, self.images[part], self.labels[part]))


class Run(NamedTuple):
    losses: list[float]
    """Of the mean model on all training samples, every few steps."""
    divergence: list[float]
    """Gamma after every step."""
    held_out: float
    largest: float
    """G^2: the largest squared gradient."""


@torch.no_grad()
def train(workers: int, method: str, period: int, seed: int, steps: int) -> Run:
    replicas = Replicas(workers, seed)
    schedule = due(method, period, replicas.layers) if method in METHODS else [frozenset[str]()]
    losses, apart, largest = [], [], 0.0
    for step in range(steps):
        largest = max(largest, replicas.step(schedule[step % len(schedule)], gradients=method not in METHODS))
        apart.append(replicas.divergence())
        if step % EVERY == EVERY - 1:
            losses.append(replicas.mean_loss(slice(0, TRAINED)))
    return Run(losses, apart, replicas.mean_loss(slice(TRAINED, None)), largest)


def trained(workers: int, seeds: int, steps: int) -> list[Trained]:
    found: list[Trained] = []
    target = 0.0
    runs = [("S-SGD", 1), *((method, period) for period in PERIODS for method in METHODS)]
    for method, period in runs:
        each = [train(workers, method, period, seed, steps) for seed in range(seeds)]
        mean = [statistics.fmean(losses) for losses in zip(*(one.losses for one in each), strict=True)]
        if method == "S-SGD":
            target = mean[int(0.6 * len(mean))]
        layers = Replicas(1, 0).layers
        averages = sum(map(len, due(method, period, layers))) / len(layers) if method in METHODS else 1.0
        found.append(
            Trained(
                workers=workers,
                method=method,
                period=period,
                averages=averages,
                loss=statistics.fmean(one.held_out for one in each),
                target_step=next((EVERY * (n + 1) for n, loss in enumerate(mean) if loss <= target), None),
                divergence=statistics.fmean(gamma for one in each for gamma in one.divergence),
                largest_divergence=max(gamma for one in each for gamma in one.divergence),
                bound=4 * period**2 * RATE**2 * max(one.largest for one in each),
            )
        )
        print(f"{workers} workers, {method}, H = {period}: {found[-1].loss:.3f}", file=sys.stderr)
    return found


def step_table(steps: Sequence[Step]) -> Table:
    drawn = Table("", "workers", *steps[0].step_s, "averages added", title="Milliseconds per step, simulated")
    for one in steps:
        added = " ".join(str(count) for count in one.filled.values())
        drawn.add_row(one.name, one.workers, *(f"{s * 1e3:.3g}" for s in one.step_s.values()), added)
    return drawn


def trained_table(rows: Sequence[Trained]) -> Table:
    drawn = Table(
        "workers",
        "H",
        "method",
        "averages a layer and period",
        "held-out loss",
        "steps to target",
        "divergence",
        "largest",
        "Lemma 4",
        "of the bound",
        title="Trained",
    )
    for r in rows:
        drawn.add_row(
            str(r.workers),
            str(r.period),
            r.method,
            f"{r.averages:.2f}",
            f"{r.loss:.4f}",
            "-" if r.target_step is None else str(r.target_step),
            f"{r.divergence:.4f}",
            f"{r.largest_divergence:.4f}",
            f"{r.bound:.2f}",
            f"{r.largest_divergence / r.bound:.1e}",
        )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = simulated()
    rows = [row for workers in options.workers for row in trained(workers, options.seeds, options.steps)]
    report = Report(when=datetime.now(UTC).isoformat(timespec="seconds"), steps=steps, trained=rows)
    write_figures(options.json, report)
    console = Console(width=230)
    console.print(step_table(steps))
    console.print(trained_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
