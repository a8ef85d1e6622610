"""A joining device: how long do the others pause while it gets its state?

`python benchmarks/joiner/run.py [--quick] [--json PATH]`

One device trains a model with more than 50 MB of weights and optimizer state; a second one comes, as another replica.
The link between them carries 200 Mbit/s. With catch-up the joining device repeats the other's steps until it is near;
without, its state travels while all wait. The pause is the longest time between the
ends of two steps, less the usual one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import PlanLayout, build_replicas
from isthmus.data import DataSpec
from isthmus.experiments import Item, LocalBackend, ProcessPlace, RunOptions, Watcher, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.job import Job, Prepared, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.programs.pipeline import Pipeline
from isthmus.runtime.coordinator.backend import DevicesAtWork, RunRequest
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.processes.device_processes import DeviceProcesses
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.listener import Listener
from isthmus.trace import Span

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
BETWEEN = Link(0.005, 200e6 / 8)
STEP_S = 3.2
"""Of one device alone: longer than a step's gradients take on the link."""
AFTER = 3
"""Steps of both, then the run is ended."""
MOST_S = 130.0
MODEL = ModelSpec(name="gpt", options={"vocab_size": 256, "sequence_length": 64, "width": 288, "layers": 5, "heads": 4})
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 200_000})


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One run, in seconds."""

    follows: bool
    step_s: float
    """Before the new device was known."""
    meanwhile_s: float
    """Median step while its state was on its way."""
    pause_s: float
    arrived_s: float
    """From when it was called to its first step."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    state_bytes: int
    gradient_bytes: int
    runs: tuple[Found, ...]


class _Work(DevicesAtWork):
    """The second device is offered when it is time."""

    def __init__(self, call: RunRequest, launcher: DeviceProcesses, comes: threading.Event) -> None:
        self._call, self._launcher, self._comes = call, launcher, comes

    def ended(self) -> dict[str, str]:
        return dict(self._launcher.ended())

    def starting(self, device: str) -> bool:
        return self._launcher.running(device)

    def offers(self) -> list[str]:
        return [d for d in self._call.others if self._comes.is_set() and not self._launcher.started(d)]

    def call(self, device: str) -> None:
        self._launcher.start(device, ProcessPlace())


class OfferingBackend(LocalBackend, frozen=True, kw_only=True):
    """Processes here, of which the second one is offered later."""

    comes: threading.Event

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        listener = Listener(self.host, timeout_s=call.timeout_s)
        listener.start(acceptor.on_connection)
        try:
            address = f"{self.host}:{listener.port}"
            with DeviceProcesses(
                address, call.run, timeout_s=call.timeout_s, threads=call.threads, logs=call.logs
            ) as launcher:
                work = _Work(call, launcher, self.comes)
                for device in call.devices:
                    work.call(device)
                yield work
        finally:
            listener.close()


def fleet_of(prepared: Prepared) -> Fleet:
    def fleet(speed: float) -> Fleet:
        devices = tuple(Device(name=n, region="here", flops_per_s=speed, memory_bytes=1 << 34) for n in ("a", "b"))
        return Fleet(name="pair", devices=devices, links=Links(default=BETWEEN))

    return fleet(prepared.problem(fleet(1.0)).cumulative_flops[-1] * prepared.job.micro_batches / STEP_S)


def one_run(prepared: Prepared, fleet: Fleet, *, follows: bool, before: int) -> Found:
    comes, stopped = threading.Event(), threading.Event()
    ends: list[float] = []
    notes: list[tuple[float, str]] = []
    both: set[int] = set()

    def replan(left: Fleet) -> Plan:
        each = prepared.job.micro_batches // len(left.names)
        return build_replicas(prepared.problem(left), [PlanLayout((d,), (), each) for d in left.names], planner="test")

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind != "train":
            return
        ends.append(time.monotonic())
        both.update(s.step for s in spans if s.device == "b" and s.track == "compute")
        if item.step + 1 == before:
            comes.set()
        if (len(both) == AFTER or ends[-1] - ends[0] > MOST_S) and not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), 2)

    def noted(text: str) -> None:
        notes.append((time.monotonic(), text))
        print(f"  {text}", file=sys.stderr)

    settles = contextlib.nullcontext() if follows else mock.patch.object(Pipeline, "_bring", Pipeline._settle)  # pyright: ignore[reportPrivateUsage]
    with tempfile.TemporaryDirectory() as folder, settles:
        options = RunOptions(replan=replan, backend=OfferingBackend(comes=comes))
        watcher = Watcher(advanced=advanced, noted=noted)
        outcome = run_plan(prepared, replan(fleet.subset(["a"])), fleet, Path(folder), options, watcher)
    if not outcome.recoveries:
        raise SystemExit(f"the new device never took part: {outcome.reason}")
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    step_s = statistics.median(gaps[: before - 1])
    changed = outcome.recoveries[0].step
    began_s = next((at_s for at_s, text in notes if "gets its state" in text), ends[changed - 1])
    meanwhile = [gap for gap, end_s in zip(gaps, ends[1:], strict=False) if began_s < end_s <= ends[changed - 1]]
    return Found(
        follows=follows,
        step_s=step_s,
        meanwhile_s=statistics.median(meanwhile or [step_s]),
        pause_s=max(gaps[before - 1 :]) - step_s,
        arrived_s=ends[changed] - ends[before - 1],
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer steps before the device joins")
    options = parser.parse_args()
    training = TrainingConfig(steps=120, batch_size=16, micro_batches=4)
    prepared = prepare(Job(name="joiner", model=MODEL, data=DATA, training=training))
    fleet = fleet_of(prepared)
    before = 3 if options.quick else 5
    found = [one_run(prepared, fleet, follows=follows, before=before) for follows in (False, True)]
    alone = build_replicas(prepared.problem(fleet.subset(["a"])), [PlanLayout(("a",), (), 4)], planner="test")
    state_bytes = StageAssignments(prepared, alone, fleet).state_bytes("a")
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        state_bytes=state_bytes,
        gradient_bytes=state_bytes // 3,
        host=machine(),
        runs=tuple(found),
    )
    write_figures(options.json, report)
    table = Table(
        "state travels",
        "step before",
        "step meanwhile",
        "all stand for",
        "called to first step",
        title=f"A joining device: {state_bytes / 1e6:.1f} MB of state, 200 Mbit/s",
    )
    for run in found:
        table.add_row(
            "while the others train" if run.follows else "while all wait",
            f"{run.step_s:.2f} s",
            f"{run.meanwhile_s:.2f} s",
            f"{run.pause_s:.1f} s",
            f"{run.arrived_s:.1f} s",
        )
    Console(width=120).print(table)
    return 0 if found[1].pause_s < found[0].pause_s else 1


if __name__ == "__main__":
    sys.exit(main())
