"""Accuracy by round of the federated algorithms on clients that have few kinds of digits each.

`python benchmarks/federated_convergence/run.py [--quick] [--json PATH]`

Writes the curves and the table of docs/federated-convergence.md. Each algorithm takes the learning rate that is best
for it on three seeds, then three others count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from isthmus import FederatedJob
from isthmus.experiments import FederatedRun, RoundLine

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

matplotlib.use("agg")
from matplotlib import pyplot as plt

LATEST = Path(__file__).parent / "results" / "latest.json"
DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "federated-convergence.md", DOCS / "federated-convergence.png"
BEGIN, END = "<!-- the table, written by the benchmark -->\n", "<!-- its end -->\n"
ROUNDS, EVERY = 200, 5
SEEDS, TUNING_SEEDS = (0, 1, 2), (100, 101, 102)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
TARGET = 0.9
ALGORITHMS: Mapping[str, dict[str, object]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "fednova": {},
    "mime": {},
    "scaffold": {},
    "feddyn": {"alpha": 0.1},
    "fedadam": {},
}


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Entries are after `EVERY` rounds each."""

    algorithm: str
    learning_rate: float
    seed: int
    loss: list[float]
    accuracy: list[float]

    @property
    def late(self) -> float:
        """Mean of the last quarter: single rounds go up and down by several points."""
        return statistics.fmean(self.accuracy[-len(self.accuracy) // 4 :])

    @property
    def rounds_to_target(self) -> int | None:
        return next((EVERY * (n + 1) for n, found in enumerate(self.accuracy) if found >= TARGET), None)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    rates: dict[str, float]
    curves: list[Curve]


def job(algorithm: str, learning_rate: float, seed: int, rounds: int) -> FederatedJob:
    document = {
        "name": "convergence",
        "metrics": ["accuracy"],
        "model": {"name": "mlp", "options": {"features": 64, "width": 64, "layers": 1, "classes": 10}},
        "data": {"kind": "digits", "options": {"flat": True, "holdout": 0.2}},
        "federated": {
            "algorithm": algorithm,
            "options": ALGORITHMS[algorithm],
            "rounds": rounds,
            "partition": {"scheme": "dirichlet", "clients": 100, "alpha": 0.1},
            "participation": {"clients": 10},
        },
        "training": {"epochs": 5, "batch_size": 20, "seed": seed, "eval_every": EVERY, "save_every": rounds},
        "learning_rate": learning_rate,
        "runtime": {"scheme": "sp"},
    }
    return msgspec.convert(document, FederatedJob)


def curve(algorithm: str, learning_rate: float, seed: int, rounds: int) -> Curve:
    lines: list[RoundLine] = []
    with tempfile.TemporaryDirectory() as folder:
        FederatedRun(job(algorithm, learning_rate, seed, rounds), Path(folder), resume=False, watch=lines.append).run()
    found = [line.evaluation for line in lines if line.evaluation is not None]
    return Curve(
        algorithm=algorithm,
        learning_rate=learning_rate,
        seed=seed,
        loss=[e.loss for e in found if e.loss is not None],
        accuracy=[e.metrics["accuracy"] or 0.0 for e in found],
    )


def best_rate(algorithm: str, rounds: int) -> float:
    """By the mean over seeds that are not compared: of a single one chance would say as much as the rate does."""
    tried = {
        rate: statistics.fmean(curve(algorithm, rate, seed, rounds).late for seed in TUNING_SEEDS) for rate in RATES
    }
    return max(tried, key=lambda rate: tried[rate])


def table(curves: Sequence[Curve]) -> Table:
    drawn = Table("algorithm", title=f"Digits by Dirichlet(0.1), 100 clients, 10 a round, {len(SEEDS)} seeds")
    for heading in ("rate", "rounds to 90 %", "accuracy, last quarter", "of seeds", "loss at the end"):
        drawn.add_column(heading, justify="right")
    for cells in rows(curves):
        drawn.add_row(*cells)
    return drawn


def rows(curves: Sequence[Curve]) -> list[list[str]]:
    found: list[list[str]] = []
    for algorithm in ALGORITHMS:
        of = [c for c in curves if c.algorithm == algorithm]
        reached = [c.rounds_to_target for c in of]
        late = [c.late for c in of]
        found.append(
            [
                algorithm,
                f"{of[0].learning_rate:g}",
                ", ".join("never" if r is None else str(r) for r in reached),
                f"{statistics.fmean(late):.1%}",
                ", ".join(f"{x:.1%}" for x in late),
                f"{statistics.fmean(c.loss[-1] for c in of):.3f}",
            ]
        )
    return found


def draw(curves: Sequence[Curve]) -> None:
    """Means over the seeds, their range as a band."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for algorithm in ALGORITHMS:
        accuracy = np.array([c.accuracy for c in curves if c.algorithm == algorithm])
        at = EVERY * (1 + np.arange(accuracy.shape[1]))
        (line,) = axes.plot(at, accuracy.mean(0), label=algorithm, linewidth=1.5)
        axes.fill_between(at, accuracy.min(0), accuracy.max(0), color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy on held-out digits", ylim=(0.3, 1.0), xlim=(0, ROUNDS))
    axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
    axes.legend(loc="lower right", ncols=2, frameon=False)
    figure.savefig(PICTURE, format="png", dpi=110, metadata={"Software": "isthmus"})
    plt.close(figure)


def write_page(curves: Sequence[Curve]) -> None:
    head = "| algorithm | rate | rounds to 90 % | accuracy, last quarter | of seeds 0, 1, 2 | loss at the end |\n"
    body = "".join("| " + " | ".join(cells) + " |\n" for cells in rows(curves))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{head}|---|---|---|---|---|---|\n{body}{END}{after}")


def main() -> int:
    parser = options_of(__doc__, LATEST, "20 rounds, one rate; the page stays as it is")
    options = parser.parse_args()
    rounds = 20 if options.quick else ROUNDS
    rates = {a: 0.1 if options.quick else best_rate(a, rounds) for a in ALGORITHMS}
    curves: list[Curve] = []
    for algorithm, rate in rates.items():
        for seed in SEEDS:
            curves.append(curve(algorithm, rate, seed, rounds))
            print(f"{algorithm}, rate {rate:g}, seed {seed}: {curves[-1].late:.1%}", file=sys.stderr)
    found = Report(
        when=datetime.now(UTC).date().isoformat(),
        host=machine(),
        rates=rates,
        curves=curves,
    )
    write_figures(options.json, found)
    Console(width=120).print(table(curves))
    if not options.quick:
        draw(curves)
        write_page(curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
