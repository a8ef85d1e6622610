"""Checkpoints in a store: what passes through the coordinator, and how long do a save and a resume take?

`python benchmarks/large_models/stored.py [--quick] [--gigabytes 0.1] [--json PATH]`

Two devices train an MLP with AdamW; the run's store is an S3 server (moto) in a process of its own. They save a
checkpoint. Then three devices, whose cut is another one, go on from it on a machine that has no folder of the run. Once
devices may write to the store, and once they send their parts to the coordinator, which uploads them, and downloads
them again. `bytes` are those of the coordinator's connections to devices and to the store, there and back: of the save
from its order until all is uploaded, of the resume until the first step is open. All goes over loopback: times are
those of memory copies, hashing, the server, and of starting the resumed run's processes.

Exit code 1: more than 1 MB passes through the coordinator while devices may write.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.api.folder import RunFolder
from isthmus.api.stored_run import documents_of, local_copy
from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, latest_checkpoint, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.protocol.run_messages import OpenItem
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.stores import Owner, Store, StoreConfig, Uploader
from isthmus.training.checkpoint import checkpoint_files
from isthmus.training.optim import OptimizerConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "stored.json"
WIDTH = 1024
MOST_BYTES = 1 << 20


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A save and a resume."""

    devices_write: bool
    state_bytes: int
    save_bytes: int
    save_s: float
    resume_bytes: int
    resume_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    runs: tuple[Found, ...]


class Counted:
    """Bytes of this process's connections to devices and stores, and the moment when an item was opened."""

    def __init__(self) -> None:
        self.store_bytes = 0
        self.channels: list[SocketChannel] = []
        self.opened: Callable[[OpenItem], None] = lambda order: None

    @property
    def now(self) -> tuple[int, float]:
        """Bytes so far, and the time."""
        sent = sum(channel.sent_bytes + channel.received_bytes for channel in self.channels)
        return sent + self.store_bytes, time.monotonic()

    @contextmanager
    def counting(self) -> Generator[None]:
        init, opens = SocketChannel.__init__, CoordinatorHost.open_item
        upload, download, ranges = Store.upload, Store.download, Store.ranges

        def make(channel: SocketChannel, *given: Any, **named: Any) -> None:
            init(channel, *given, **named)
            self.channels.append(channel)

        def open_item(host: CoordinatorHost, order: OpenItem) -> None:
            self.opened(order)
            opens(host, order)

        def uploaded(store: Store, local: Path, name: str) -> None:
            self.store_bytes += local.stat().st_size
            upload(store, local, name)

        def downloaded(store: Store, name: str, local: Path) -> None:
            download(store, name, local)
            self.store_bytes += local.stat().st_size

        def read(store: Store, name: str, spans: Any) -> list[bytes]:
            found = ranges(store, name, spans)
            self.store_bytes += sum(map(len, found))
            return found

        with (
            mock.patch.object(SocketChannel, "__init__", make),
            mock.patch.object(CoordinatorHost, "open_item", open_item),
            mock.patch.object(Store, "upload", uploaded),
            mock.patch.object(Store, "download", downloaded),
            mock.patch.object(Store, "ranges", read),
        ):
            yield


def serve() -> None:
    """Be the S3 server; print the address."""
    moto: Any = importlib.import_module("moto.server")
    serving: Any = importlib.import_module("werkzeug.serving")
    importlib.import_module("logging").getLogger("werkzeug").setLevel("ERROR")
    app = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = serving.make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


@contextmanager
def s3() -> Generator[None]:
    """The server, with a bucket, where processes of this one find it."""
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe"
        os.environ |= {"AWS_ENDPOINT_URL": process.stdout.readline().strip(), "AWS_ACCESS_KEY_ID": "a"}
        os.environ |= {"AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_EC2_METADATA_DISABLED": "true"}
        importlib.import_module("fsspec").filesystem("s3").mkdir("bucket")
        try:
            yield
        finally:
            process.kill()


def prepared_of(gigabytes: float) -> Prepared:
    """Of a model whose weights and AdamW's state take so much."""
    layers = max(4, round(gigabytes * 1e9 / 12 / WIDTH**2))
    model = ModelSpec(name="mlp", options={"width": WIDTH, "layers": layers})
    training = TrainingConfig(steps=2, batch_size=4, micro_batches=2, save_every=1)
    optimizer = (OptimizerConfig(name="adamw", lr=1e-3),)
    runtime = RuntimeConfig(adapt=False, emulate=False)
    data = DataSpec(kind="digits")
    return prepare(Job(name="stored", model=model, data=data, training=training, optimizer=optimizer, runtime=runtime))


def trained(
    prepared: Prepared, folder: RunFolder, url: str, stages: int, *, writes: bool, until: int, after: Path | None = None
) -> None:
    """Train to this step, and upload."""
    devices = tuple(Device(name=f"d{i}", region="here", flops_per_s=1e12, memory_bytes=1 << 36) for i in range(stages))
    fleet = Fleet(name="here", devices=devices, links=Links(default=Link(1e-4, 1e9)))
    legal = cuts(Flow(prepared.captured.train))
    ends = [legal[len(legal) * part // stages].position for part in range(1, stages)]
    plan = build_plan(prepared.problem(fleet), fleet.names, ends, planner="benchmark")
    if not folder.begun:
        folder.begin(prepared.job, fleet, plan, 0)
    owner = Owner(run="r", session=str(stages))
    uploader = Uploader(Store(url), folder.path, owner, documents_of, StoreConfig(url=url))
    uploader.start()
    places = {name: ProcessPlace(checkpoints_to=("s3://bucket",) if writes else ()) for name in fleet.names}
    options = RunOptions(
        emulate=False,
        backend=LocalBackend(places=places),
        store=url,
        resume_from=after,
        until=until,
    )

    def saved(step: int, directory: Path) -> None:
        uploader.committed(directory.relative_to(folder.path).as_posix())

    watcher = Watcher(saved=saved, noted=lambda text: print(f"  {text}", file=sys.stderr))
    outcome = run_plan(prepared, plan, fleet, folder.path, options, watcher)
    if outcome.outcome != "done" or not uploader.close(600):
        raise SystemExit(outcome.reason or uploader.failure)


def measure(prepared: Prepared, url: str, *, writes: bool) -> Found:
    counted = Counted()
    marks: dict[str, tuple[int, float]] = {}

    def opened(order: OpenItem) -> None:
        marks.setdefault(f"{order.item.kind} {order.item.step}", counted.now)

    counted.opened = opened
    with tempfile.TemporaryDirectory() as name, counted.counting():
        first, second = RunFolder(Path(name) / "first"), Path(name) / "second"
        trained(prepared, first, url, 2, writes=writes, until=1)
        marks["saved"] = marks["resume"] = counted.now
        with local_copy(url) as found:
            found.rename(second)
            found.mkdir()  # for who removes it
        at = latest_checkpoint(second / "checkpoints")
        state_bytes = sum(t.nbytes for t in checkpoint_files(at).values())
        trained(prepared, RunFolder(second), url, 3, writes=writes, until=2, after=at)
    save, resume = ((marks["save 1"], marks["saved"]), (marks["resume"], marks["train 1"]))
    return Found(
        devices_write=writes,
        state_bytes=state_bytes,
        save_bytes=save[1][0] - save[0][0],
        save_s=save[1][1] - save[0][1],
        resume_bytes=resume[1][0] - resume[0][0],
        resume_s=resume[1][1] - resume[0][1],
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, "20 MB of state")
    parser.add_argument("--gigabytes", type=float, action="append", help="state of all stages; default 0.1")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    runs: list[Found] = []
    with s3():
        for number, size in enumerate(options.gigabytes or [0.02 if options.quick else 0.1]):
            prepared = prepared_of(size)
            runs += [measure(prepared, f"s3://bucket/{number}-{writes}", writes=writes) for writes in (True, False)]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    write_figures(options.json, Report(when=when, host=machine(), runs=tuple(runs)))
    table = Table("state", "devices write", "save: bytes", "time", "resume: bytes", "time")
    for run in runs:
        table.add_row(
            f"{run.state_bytes / 1e6:.0f} MB",
            "yes" if run.devices_write else "no",
            f"{run.save_bytes / 1e6:.2f} MB",
            f"{run.save_s:.1f} s",
            f"{run.resume_bytes / 1e6:.2f} MB",
            f"{run.resume_s:.1f} s",
        )
    Console(width=120).print(table)
    fits = all(max(run.save_bytes, run.resume_bytes) <= MOST_BYTES for run in runs if run.devices_write)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
