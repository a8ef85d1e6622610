"""Trackers: what they cost a step.

`python benchmarks/trackers/run.py [--quick] [--json PATH]`

The same run with five trackers and without, in turns: two emulated devices, whose steps take 0.1 s and this machine a
small part of that. What counts is the time from step to step. The first steps of a run, in which libraries are imported
and databases made, are counted by themselves.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import isthmus
from isthmus.data import DataSpec
from isthmus.fleet import Device, Fleet, Link, Links, dump_fleet
from isthmus.job import Job, RuntimeConfig, TrainingConfig
from isthmus.models import ModelSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
LIMIT = 0.01
FIRST_S = 20.0
"""After a run's first step: until then trackers begin."""
TO = ("tensorboard", "wandb", "trackio", "mlflow", "prometheus")
TRACK = isthmus.Track(to=TO, options={"wandb": {"mode": "offline"}})
OPTIONS: dict[str, object] = {"vocab_size": 256, "sequence_length": 32, "width": 32, "layers": 2, "heads": 2}
MODEL = ModelSpec(name="gpt", options=OPTIONS)
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 32, "max_bytes": 200_000})


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    trackers: tuple[str, ...]
    without_s: list[list[float]] = []
    """Of each run, the times from step to step after the first `FIRST_S`."""
    with_s: list[list[float]] = []
    first_without_s: list[float] = []
    """Of each run, the mean time from step to step before that."""
    first_with_s: list[float] = []
    cpu_without_s: list[float] = []
    """Of each run, the coordinator's processor time of a step after the first `FIRST_S`."""
    cpu_with_s: list[float] = []
    end_s: list[float] = []
    """Of each run with trackers, what they took at its end."""

    @property
    def cost(self) -> float:
        """Of the medians over all runs."""
        return statistics.median(chain(*self.with_s)) / statistics.median(chain(*self.without_s)) - 1


class Clock(isthmus.Callback):
    """When steps were done. It is called before the trackers."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.cpu_s: list[float] = []
        self.ended_s = 0.0

    def step(self, done: isthmus.StepDone) -> None:
        self.steps_s.append(time.monotonic())
        self.cpu_s.append(time.process_time())

    def end(self, ended: isthmus.RunEnded) -> None:
        self.ended_s = time.monotonic()


class Quiet(isthmus.Observer):
    """Progress is shown to nobody."""


def job_of(steps: int, folder: Path) -> Job:
    devices = tuple(Device(name=name, region="here", flops_per_s=0.4e9, memory_bytes=1 << 32) for name in ("a", "b"))
    fleet = folder / "fleet.toml"
    fleet.write_text(
        dump_fleet(Fleet(name="two", devices=devices, links=Links(default=Link(0.002, 100e6 / 8)))), encoding="utf-8"
    )
    return Job(
        name="tracked",
        model=MODEL,
        data=DATA,
        fleet=str(fleet),
        planner="even",
        training=TrainingConfig(steps=steps, batch_size=8, micro_batches=4),
        runtime=RuntimeConfig(adapt=False, snapshots=False),
    )


def one_run(report: Report, steps: int, *, tracked: bool) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")
        job = job_of(steps, Path(folder))
        if tracked:
            job = msgspec.structs.replace(job, track=TRACK)
        run = isthmus.train(job, run=Path(folder) / "run", callbacks=[clock], observer=Quiet())
        end_s = time.monotonic() - clock.ended_s
        assert run.outcome == "done"
    times = [after - before for before, after in pairwise(clock.steps_s)]
    first = sum(at < clock.steps_s[0] + FIRST_S for at in clock.steps_s[1:])
    (report.with_s if tracked else report.without_s).append(times[first:])
    (report.first_with_s if tracked else report.first_without_s).append(statistics.fmean(times[:first]))
    cpu_s = (clock.cpu_s[-1] - clock.cpu_s[first]) / (len(clock.cpu_s) - 1 - first)
    (report.cpu_with_s if tracked else report.cpu_without_s).append(cpu_s)
    if tracked:
        report.end_s.append(end_s)
    print(f"  {'with' if tracked else 'without'}: {statistics.median(times[first:]):.4f} s", file=sys.stderr)


def main() -> int:
    parser = options_of(__doc__, LATEST, "one run of each kind")
    parser.add_argument("--steps", type=int, default=500, help="of each run")
    asked = parser.parse_args()
    report = Report(when=datetime.now(UTC).isoformat(timespec="seconds"), host=machine(), trackers=TO)
    for tracked in (False, True) if asked.quick else (False, True, True, False, False, True):
        one_run(report, asked.steps, tracked=tracked)
    table = Table(title=f"A step with {', '.join(TO)}: median after the first {FIRST_S:g} s of each run")
    for column in ("", "without", "with", "cost"):
        table.add_column(column, justify="right")
    both = [statistics.median(chain(*times)) for times in (report.without_s, report.with_s)]
    early = [statistics.fmean(times) for times in (report.first_without_s, report.first_with_s)]
    processor = [statistics.fmean(times) for times in (report.cpu_without_s, report.cpu_with_s)]
    for name, (without_s, with_s) in (("a step", both), ("of the first", early), ("coordinator's CPU", processor)):
        share = f"{with_s / without_s - 1:+.1%}"
        table.add_row(name, f"{1e3 * without_s:.2f} ms", f"{1e3 * with_s:.2f} ms", share)
    table.add_row("the end", "", f"{statistics.fmean(report.end_s):.1f} s", "")
    Console().print(table)
    write_figures(asked.json, report)
    return 0 if report.cost <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
