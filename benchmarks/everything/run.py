"""One run of many kinds: three pipelines in three regions, merged while devices are lost and come back.

`python benchmarks/everything/run.py [--hours H] [--seeds N] [--plain LR] [--real] [--seconds S] [--losses N] [--json
PATH]`: hours on the virtual clock; with `--plain`, one process that trains on as many samples as the real run; with
`--real`, a real run of so many seconds on this machine and its picture. What came out: README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from plain import Plain, plain
from real import Real, job_for, real
from rich.console import Console
from rich.table import Table
from simulated import Simulated, simulated

from isthmus.job import load_job

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
JOB = HERE.parents[1] / "examples" / "everything.toml"
A_LOSS_EVERY_S = 1800.0
"""Of a real run: of ten devices, 20 % are lost in an hour."""


class Report(msgspec.Struct, kw_only=True):
    host: str
    simulated: list[Simulated] = []
    plain: list[Plain] = []
    real: Real | None = None


def main() -> None:
    options = options_of(__doc__, LATEST)
    options.add_argument("--hours", type=float, default=4.0, help="of each simulated run; 0: none")
    options.add_argument("--seeds", type=int, default=3, help="simulated runs")
    options.add_argument(
        "--plain", type=float, nargs="*", default=[], metavar="LR", help="in one process, at these rates"
    )
    options.add_argument("--real", action="store_true", help="a real run")
    options.add_argument("--seconds", type=float, default=1800.0, help="of the real run")
    options.add_argument("--losses", type=int, help="in the real run, by default one in half an hour")
    given = options.parse_args()
    torch.set_num_threads(1)
    job = msgspec.structs.replace(load_job(JOB), fleet=str(JOB.with_name("everything-fleet.toml")))
    path: Path = given.json
    if given.hours:
        hours = [simulated(job, given.hours, seed) for seed in range(given.seeds)]
        write_figures(path, msgspec.structs.replace(_known(path), simulated=hours))
    own = job_for(job, given.seconds) if given.plain or given.real else job
    for rate in given.plain:
        alone = plain(own, rate)
        others = [other for other in _known(path).plain if other.learning_rate != rate]
        write_figures(path, msgspec.structs.replace(_known(path), plain=[*others, alone]))
    if given.real:
        losses = max(1, round(given.seconds / A_LOSS_EVERY_S)) if given.losses is None else given.losses
        path.parent.mkdir(parents=True, exist_ok=True)
        run = real(own, given.seconds, losses, path.with_suffix(".png"))
        write_figures(path, msgspec.structs.replace(_known(path), real=run))
    _show(_known(path))


def _known(path: Path) -> Report:
    """Read again each time: parts may run side by side."""
    return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report(host=machine())


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
        hours, losses = f"{one.seconds / 3600:.2f}", str(len(one.killed))
        alone = {found.learning_rate: found.at(one.samples) for found in report.plain}
        figures = [f"{rate:g}: {loss:.4f} ({one.loss / loss - 1:+.2%})" for rate, loss in sorted(alone.items())]
        row = ("real", hours, losses, f"{one.used:.1%}", "", "", str(one.merges), f"{one.loss:.4f}")
        table.add_row(*row, "\n".join(figures))
    console.print(table)


if __name__ == "__main__":
    main()
