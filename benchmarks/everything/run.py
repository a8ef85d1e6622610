"""One run of many kinds: three pipelines in three regions, merged while devices are lost and come back.

`python benchmarks/everything/run.py [--hours H] [--seeds N] [--real SECONDS] [--losses N] [--json PATH]`: hours on the
virtual clock, then, with `--real`, a real run of so many seconds on this machine and its picture. What came out:
README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from real import Real, real
from rich.console import Console
from rich.table import Table
from simulated import Simulated, simulated

from isthmus.job import load_job

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
JOB = HERE.parents[1] / "examples" / "everything.toml"
A_LOSS_EVERY_S = 600.0
"""Of a real run."""


class Report(msgspec.Struct, kw_only=True):
    host: str
    simulated: list[Simulated] = []
    real: Real | None = None


def main() -> None:
    options = options_of(__doc__, LATEST)
    options.add_argument("--hours", type=float, default=4.0, help="of each simulated run; 0: none")
    options.add_argument("--seeds", type=int, default=3, help="simulated runs")
    options.add_argument("--real", type=float, default=0.0, metavar="SECONDS", help="of a real run")
    options.add_argument("--losses", type=int, help="in the real run, by default one in ten minutes")
    given = options.parse_args()
    torch.set_num_threads(1)
    job = msgspec.structs.replace(load_job(JOB), fleet=str(JOB.with_name("everything-fleet.toml")))
    report = Report(host=machine())
    if given.json.exists():
        report = msgspec.json.decode(given.json.read_bytes(), type=Report)
    if given.hours:
        report.simulated = [simulated(job, given.hours, seed) for seed in range(given.seeds)]
        write_figures(given.json, report)
    if given.real:
        losses = max(1, round(given.real / A_LOSS_EVERY_S)) if given.losses is None else given.losses
        given.json.parent.mkdir(parents=True, exist_ok=True)
        report.real = real(job, given.real, losses, given.json.with_suffix(".png"))
        write_figures(given.json, report)
    _show(report)


def _show(report: Report) -> None:
    console = Console(width=120)
    table = Table(
        "run",
        "hours",
        "losses",
        "used",
        "without losses",
        "goodput",
        "merges",
        "loss",
        "in one process",
        title="everything",
    )
    for one in report.simulated:
        table.add_row(
            f"simulated, seed {one.seed}",
            f"{one.hours:.2f}",
            str(one.losses),
            f"{one.used:.1%}",
            f"{one.undisturbed:.1%}",
            f"{one.goodput:.1%}",
            str(one.merges),
        )
    if (one := report.real) is not None:
        figures = (f"{one.loss:.4f}", f"{one.alone:.4f} ({one.loss / one.alone - 1:+.2%})")
        hours, losses = f"{one.seconds / 3600:.2f}", str(len(one.killed))
        table.add_row("real", hours, losses, f"{one.used:.1%}", "", "", str(one.merges), *figures)
    console.print(table)


if __name__ == "__main__":
    main()
