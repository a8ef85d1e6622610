"""The same schedules in real processes on this machine, and the virtual clock against the real one.

`python benchmarks/federated_scheduling/real.py [--quick] [--json PATH] [--only schedules|clocks|crossed]`

Schedules: 1,000 clients a round on four processes that sleep until they are as slow as asked, with 30 % noise in every
client's time. Clocks: executors as they are, and emulated ones; every round is foretold from the rounds just before it.
Crossed: stealing in every other round; what rounds with it take is foretold from those without it, and the reverse.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from bounds import bound_s
from clocks import Alternating, calm_lines, foretell
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from run import leaf_sizes

from isthmus import FederatedJob
from isthmus.data import DataSpec, load_dataset
from isthmus.experiments import FederatedRun, RoundLine
from isthmus.federated.cohorts import Cohorts
from isthmus.federated.job import emulation, members
from isthmus.protocol.federated_scheduler import ThroughputModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "real.json"
CLIENTS, PER_ROUND, ROUNDS, SKIPPED = 3400, 1000, 10, 2
NOISE = 0.3
EXECUTORS = (1.0, 3.0, 7.0, 15.0)
"""Eta: 1:2:4:8, the first at half this machine's speed, so that noise can make a client quicker too."""
STRATEGIES: dict[str, dict[str, object]] = {
    "uniform": {"planner": "uniform", "steals": False},
    "parrot": {"planner": "parrot", "steals": False},
    "certified": {"planner": "certified", "steals": False},
    "certified and stealing": {},
}
KNOWN_CLIENTS = 2 * PER_ROUND
"""Trained in the rounds from which the next one is foretold: a second or two, as a machine's speed drifts."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, over the rounds after the first `SKIPPED`."""

    setting: str
    strategy: str
    over_bound: float
    worst_over_bound: float
    round_s: float
    stolen: float


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """A run of which every round was foretold from those just before it. `off` is of simulated over measured times."""

    setting: str
    rounds: int
    """Foretold."""
    measured_s: float
    """Median time of a round."""
    simulated_s: float
    off: float
    """Median over the rounds."""
    total_off: float
    """Of the time of all of them together."""
    scatter: float
    """Of single rounds about the median, whichever way: the median."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    outcomes: tuple[Outcome, ...] = ()
    clocks: tuple[Clocks, ...] = ()
    crossed: tuple[Clocks, ...] = ()


def write_samples(path: Path, sizes: NDArray[np.int64]) -> None:
    """Digits, drawn with repetition."""
    whole = load_dataset(DataSpec(kind="digits", options={"flat": True, "holdout": 0.0}), "train")
    drawn = np.random.default_rng(0).integers(len(whole), size=int(sizes.sum()))
    columns = whole.batch(drawn, ["pixel_values", "labels"])
    np.savez(
        path,
        pixel_values=columns["pixel_values"].numpy(),
        labels=columns["labels"].numpy(),
        client=np.repeat(np.arange(len(sizes)), sizes),
    )


def job_of(samples: Path, per_round: int, rounds: int, execution: Mapping[str, object]) -> FederatedJob:
    document = {
        "name": "scheduled",
        "model": {"name": "mlp", "options": {"features": 64, "width": 64, "layers": 1, "classes": 10}},
        "data": {"kind": "npz", "options": {"path": str(samples), "heldout_path": str(samples)}},
        "federated": {
            "rounds": rounds,
            "partition": {"scheme": "natural"},
            "participation": {"clients": per_round},
        },
        "training": {"eval_every": 0, "save_every": rounds},
        "runtime": execution,
    }
    return msgspec.convert(document, FederatedJob)


def run(job: FederatedJob, *, alternating: bool = False) -> tuple[list[RoundLine], NDArray[np.int64]]:
    lines: list[RoundLine] = []
    with tempfile.TemporaryDirectory() as folder:
        made = FederatedRun(job, Path(folder), resume=False, watch=lines.append)
        if alternating:
            names, rules = made.machine.executors, made.machine.rules
            throughput = ThroughputModel(len(names), window_rounds=job.runtime.window_rounds)
            made.machine = Alternating(names, rules, made.data.sizes, Cohorts(job, made.data.sizes).members, throughput)
        made.run()
    return lines, made.data.sizes


def factors(job: FederatedJob, round_: int) -> list[float]:
    return [emulation(job, k).factor(round_) for k in range(job.runtime.executors)]


def schedule(setting: str, strategy: str, samples: Path, rounds: int) -> Outcome:
    unstable = setting == "unstable"
    etas = [1.0] * 4 if unstable else list(EXECUTORS)
    execution = {"executors": 4, "slow_down": etas, "unstable": unstable, "noise": NOISE, **STRATEGIES[strategy]}
    job = job_of(samples, PER_ROUND, rounds, execution)
    lines, sizes = run(job)
    true, _ = calm_lines(job, lines[SKIPPED:])
    over = [
        line.seconds / bound_s(sizes[members(job, sizes, n)], true, factors(job, n))
        for line in lines[SKIPPED:]
        for n in [line.record.round]
    ]
    return Outcome(
        setting=setting,
        strategy=strategy,
        over_bound=statistics.fmean(over),
        worst_over_bound=max(over),
        round_s=statistics.fmean(line.seconds for line in lines[SKIPPED:]),
        stolen=statistics.fmean(line.record.stolen for line in lines[SKIPPED:]),
    )


def clocks(setting: str, samples: Path, per_round: int, rounds: int, execution: Mapping[str, object]) -> Clocks:
    job = job_of(samples, per_round, rounds, execution)
    lines, sizes = run(job)
    known = KNOWN_CLIENTS // per_round
    told = range(SKIPPED + known, rounds)
    return compared(setting, [foretell(job, sizes, lines[n - known : n], n) for n in told], [lines[n] for n in told])


def crossed(setting: str, samples: Path, rounds: int, execution: Mapping[str, object]) -> list[Clocks]:
    """Two: of the rounds with stealing, and of those without it."""
    job = job_of(samples, PER_ROUND, rounds, execution)
    lines, sizes = run(job, alternating=True)
    known = 2 * KNOWN_CLIENTS // PER_ROUND
    found: list[Clocks] = []
    for steals in (True, False):
        one = msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, steals=steals))
        told = [n for n in range(SKIPPED + known, rounds) if Alternating.steals_in(n) == steals]
        simulated = [foretell(one, sizes, lines[n - known + 1 : n : 2], n) for n in told]
        what = "stealing, from rounds without" if steals else "no stealing, from rounds with"
        found.append(compared(f"{setting}: {what}", simulated, [lines[n] for n in told]))
    return found


def compared(setting: str, simulated_s: list[float], lines: list[RoundLine]) -> Clocks:
    simulated, measured = np.array(simulated_s), np.array([line.seconds for line in lines])
    over = simulated / measured
    middle = float(np.median(over))
    return Clocks(
        setting=setting,
        rounds=len(lines),
        measured_s=float(np.median(measured)),
        simulated_s=float(np.median(simulated)),
        off=middle - 1,
        total_off=float(simulated.sum() / measured.sum()) - 1,
        scatter=float(np.median(np.abs(over / middle - 1))),
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer rounds, without the uniform schedule")
    parser.add_argument("--only", choices=("schedules", "clocks", "crossed"))
    options = parser.parse_args()
    rounds = 5 if options.quick else ROUNDS
    before = msgspec.json.decode(options.json.read_bytes(), type=Report) if options.json.is_file() else None
    outcomes: list[Outcome] = [] if before is None else list(before.outcomes)
    found: list[Clocks] = [] if before is None else list(before.clocks)
    cross: list[Clocks] = [] if before is None else list(before.crossed)
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.npz"
        write_samples(samples, np.maximum(leaf_sizes(CLIENTS) // 4, 1))
        emulated = {"executors": 4, "slow_down": list(EXECUTORS), "noise": NOISE}
        unstable = {"executors": 4, "slow_down": [1.0] * 4, "unstable": True, "noise": NOISE}
        if options.only in (None, "schedules"):
            chosen = [s for s in STRATEGIES if s != "uniform" or not options.quick]
            outcomes = [
                schedule(setting, s, samples, rounds) for setting in ("heterogeneous", "unstable") for s in chosen
            ]
        if options.only in (None, "clocks"):
            found = [
                clocks("2 executors as they are", samples, PER_ROUND, 6 * rounds, {"executors": 2}),
                clocks("2 executors, 20 clients", samples, 20, 60 * rounds, {"executors": 2}),
                clocks("1:2:4:8, 30 % noise", samples, PER_ROUND, 5 * rounds, emulated),
                clocks("unstable, 30 % noise", samples, PER_ROUND, 6 * rounds, unstable),
            ]
        if options.only in (None, "crossed"):
            cross = [
                *crossed("1:2:4:8", samples, 5 * rounds, emulated),
                *crossed("unstable", samples, 6 * rounds, unstable),
            ]
    report = Report(
        when=datetime.now(UTC).date().isoformat(),
        host=machine(),
        outcomes=tuple(outcomes),
        clocks=tuple(found),
        crossed=tuple(cross),
    )
    write_figures(options.json, report)
    show(report)
    return 0


def show(report: Report) -> None:
    table = Table("setting", "strategy", title=f"{PER_ROUND:,} clients a round, 4 processes, noise {NOISE:.0%}")
    for column in ("over bound", "worst", "round", "stolen"):
        table.add_column(column, justify="right")
    for o in report.outcomes:
        table.add_row(
            o.setting,
            o.strategy,
            f"{o.over_bound:.3f}",
            f"{o.worst_over_bound:.3f}",
            f"{o.round_s:.2f} s",
            f"{o.stolen:.0f}",
        )
    clocked = Table("setting", title="The virtual clock against the real one")
    for column in ("rounds", "measured", "simulated", "off", "off in all", "scatter of a round"):
        clocked.add_column(column, justify="right")
    for c in (*report.clocks, *report.crossed):
        clocked.add_row(
            c.setting,
            str(c.rounds),
            f"{c.measured_s:.4f} s",
            f"{c.simulated_s:.4f} s",
            f"{c.off:+.1%}",
            f"{c.total_off:+.1%}",
            f"{c.scatter:.1%}",
        )
    console = Console()
    console.print(table)
    console.print(clocked)


if __name__ == "__main__":
    sys.exit(main())
