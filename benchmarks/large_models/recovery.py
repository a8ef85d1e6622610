"""Recovery of a large stage: how long does its state take to a spare device, and what passes through the coordinator?

`python benchmarks/large_models/recovery.py [--quick] [--gigabytes 0.1 --gigabytes 1] [--json PATH]`

Two devices train a pipeline. The second one, whose stage has nearly all of the state, is killed once the first one has
a copy of it. A spare device takes its place and gets the state from the first one over an emulated link. `placed` is
from the coordinator's order until all devices have their stages, `recovered` from the kill until the next step is done:
it has the time for the failure to be certain, for a plan, and for the spare device's process to start.

The goal is 1.2 times the bytes over the link and 2 s, and 1 MB through the coordinator whatever the state's size.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import Item, RunOptions, Watcher, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.protocol.run_messages import OpenItem
from isthmus.protocol.run_ports import EpochStart
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.trace import Span

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from tests.runtime.commands import devices_of

from harness import in_time, machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "recovery.json"
LINKS = {"1 Gbit/s": Link(0.001, 125e6), "200 Mbit/s": Link(0.005, 25e6)}
WIDTH = 2048
MOST_BYTES = 1 << 20


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery."""

    link: str
    state_bytes: int
    placed_s: float
    goal_s: float
    recovered_s: float
    coordinator_bytes: int  # sent and received while devices got their stages


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    runs: tuple[Found, ...]


class Watched:
    """The moments of a run's second epoch, and the bytes of the coordinator's connections between them."""

    def __init__(self) -> None:
        self.killed_s = self.began_s = self.placed_s = self.done_s = 0.0
        self.coordinator_bytes = 0
        self.channels: list[SocketChannel] = []

    def moved(self) -> int:
        return sum(channel.sent_bytes + channel.received_bytes for channel in self.channels)

    def begins(self, begin: Callable[[CoordinatorHost, EpochStart], None]) -> Callable[..., None]:
        def begin_epoch(host: CoordinatorHost, start: EpochStart) -> None:
            if start.epoch:
                self.began_s, self.coordinator_bytes = time.monotonic(), -self.moved()
            begin(host, start)

        return begin_epoch

    def opens(self, opened: Callable[[CoordinatorHost, OpenItem], None]) -> Callable[..., None]:
        def open_item(host: CoordinatorHost, order: OpenItem) -> None:
            if self.began_s and not self.placed_s:
                self.placed_s, self.coordinator_bytes = time.monotonic(), self.coordinator_bytes + self.moved()
            opened(host, order)

        return open_item

    def made(self, init: Callable[..., None]) -> Callable[..., None]:
        def make(channel: SocketChannel, *given: object, **named: object) -> None:
            init(channel, *given, **named)
            self.channels.append(channel)

        return make


def prepared_of(gigabytes: float) -> Prepared:
    layers = max(2, round(gigabytes * 1e9 / 12 / WIDTH**2) + 1)
    model = ModelSpec(name="mlp", options={"width": WIDTH, "layers": layers})
    training = TrainingConfig(steps=10_000, batch_size=4, micro_batches=2)
    runtime = RuntimeConfig(snapshot_every=4, adapt=False)
    return prepare(Job(name="recovery", model=model, data=DataSpec(kind="digits"), training=training, runtime=runtime))


def one_run(prepared: Prepared, name: str, link: Link) -> Found:
    devices = tuple(Device(name=f"d{i}", region="here", flops_per_s=1e12, memory_bytes=1 << 36) for i in range(3))
    fleet = Fleet(name="three", devices=devices, links=Links(default=link))
    first_cut = cuts(Flow(prepared.captured.train))[0].position
    watched = Watched()

    def replan(left: Fleet) -> Plan:
        return build_plan(prepared.problem(left), left.names[:2], [first_cut], planner="benchmark")

    def kill(step: int) -> None:
        if not watched.killed_s:
            watched.killed_s = time.monotonic()
            os.kill(devices_of(os.getpid())["d1"], signal.SIGKILL)

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if watched.placed_s and item.kind == "train" and not watched.done_s:
            watched.done_s = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

    first = replan(fleet.subset(["d0", "d1"]))
    patches = (
        mock.patch.object(CoordinatorHost, "begin_epoch", watched.begins(CoordinatorHost.begin_epoch)),
        mock.patch.object(CoordinatorHost, "open_item", watched.opens(CoordinatorHost.open_item)),
        mock.patch.object(SocketChannel, "__init__", watched.made(SocketChannel.__init__)),
    )
    with tempfile.TemporaryDirectory() as folder, patches[0], patches[1], patches[2]:
        watcher = Watcher(advanced=advanced, acknowledged=kill, noted=lambda text: print(f"  {text}", file=sys.stderr))
        outcome = run_plan(prepared, first, fleet, Path(folder), RunOptions(replan=replan), watcher)
    if not watched.done_s:
        raise SystemExit(f"the run did not recover: {outcome.reason}")
    state_bytes = StageAssignments(prepared, first, fleet).state_bytes("d1")
    return Found(
        link=name,
        state_bytes=state_bytes,
        placed_s=watched.placed_s - watched.began_s,
        goal_s=1.2 * state_bytes / link.bandwidth_bytes_per_s + 2.0,
        recovered_s=watched.done_s - watched.killed_s,
        coordinator_bytes=watched.coordinator_bytes,
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, "50 MB of state")
    parser.add_argument("--gigabytes", type=float, action="append", help="state of the lost stage; default 0.1")
    options = parser.parse_args()
    sizes = options.gigabytes or [0.05 if options.quick else 0.1]
    runs = [one_run(made, name, link) for made in map(prepared_of, sizes) for name, link in LINKS.items()]
    write_figures(
        options.json, Report(when=datetime.now(UTC).isoformat(timespec="seconds"), host=machine(), runs=tuple(runs))
    )
    table = Table("state", "link", "placed", "goal", "recovered", "through the coordinator")
    for run in runs:
        table.add_row(
            f"{run.state_bytes / 1e6:.0f} MB",
            run.link,
            f"{run.placed_s:.1f} s",
            f"{run.goal_s:.1f} s",
            f"{run.recovered_s:.1f} s",
            f"{run.coordinator_bytes / 1e3:.0f} kB",
        )
    Console(width=120).print(table)
    fits = all(in_time(run.placed_s, run.goal_s) and run.coordinator_bytes <= MOST_BYTES for run in runs)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
