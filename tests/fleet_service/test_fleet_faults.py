"""A fleet of machines in which something goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.api.folder import RunFolder
from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet as FleetOfDevices
from isthmus.job import prepare
from isthmus.plans import Plan
from isthmus.protocol import Item
from isthmus.trace import Span
from tests.faults.real import job, keeps_cuts
from tests.runtime.commands import COMMAND, edited, wait_until, write_job
from tests.runtime.jobs import fleet_of, random_cut

from .doors import family_of
from .parties import Fleet
from .test_fleet_runs import Devices

STEPS = 80
FLEET = """
name = "two"

[[device]]
name = "d0"
region = "here"
compute = "1 GFLOPS"
memory = "1 GiB"

[[device]]
name = "d1"
region = "here"
compute = "1 GFLOPS"
memory = "1 GiB"

[links]
default = { latency = "1 ms", bandwidth = "1 Gbit/s" }
"""
RUNTIME = """[runtime]
timeout = "5 s"
snapshot_every = 20

[learning_rate]"""


@pytest.mark.long
def test_a_device_leaves_without_loss(fleet: Fleet, tmp_path: Path) -> None:
    made = job(emulate=False, steps=60)
    prepared, machines = prepare(made), fleet_of(2)
    replan = keeps_cuts(prepared, random_cut(prepared, 2, 0, once=True))
    devices = Devices(fleet, tmp_path, ("d0", "d1"))
    notes: list[str] = []
    told: list[int] = []

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            told.append(item.step)
            time.sleep(0.02)
            if item.step == 10:
                fleet.state.drain("d1")

    outcome = run_plan(
        prepared,
        replan(machines),
        machines,
        tmp_path / "run",
        RunOptions(emulate=False, backend=fleet.service, replan=replan),
        Watcher(advanced=advanced, noted=notes.append),
    )
    assert outcome.outcome == "done", (outcome.reason, notes)
    (recovery,) = outcome.recoveries
    assert recovery.redone == 0 and not recovery.from_checkpoint
    assert told == list(range(60)), "no step is done twice"
    assert "d1 has left" in notes
    devices.stop()


def _device_processes() -> list[int]:
    """Those that agents of this process have started."""
    found = family_of(os.getpid())
    return [p for p in found if Path(f"/proc/{p}/cmdline").read_bytes().startswith(b"isthmus device")]


def test_the_only_process_dies_and_its_device_is_called_again(fleet: Fleet, tmp_path: Path) -> None:
    prepared, machines = prepare(job(emulate=False, steps=12, save_every=4)), fleet_of(1)
    devices = Devices(fleet, tmp_path, ("d0",))
    notes: list[str] = []

    def replan(fleet: FleetOfDevices) -> Plan:
        return build_plan(prepared.problem(fleet), fleet.names, [], planner="test")

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if (item.kind, item.step) == ("train", 6) and not notes:
            for pid in _device_processes():
                os.kill(pid, signal.SIGKILL)

    outcome = run_plan(
        prepared,
        replan(machines),
        machines,
        tmp_path / "run",
        RunOptions(emulate=False, backend=fleet.service, replan=replan),
        Watcher(advanced=advanced, noted=lambda text: notes.append(text) if "waiting" not in text else None),
    )
    assert outcome.outcome == "done", (outcome.reason, notes)
    (recovery,) = outcome.recoveries
    assert recovery.from_checkpoint and recovery.step in (4, 8), "a device may be items ahead of what was reported"
    assert "d0: its process was killed by SIGKILL): calling d0 again, attempt 1 of 3" in notes[0], notes
    devices.stop()


class Machines:
    """`isthmus serve` and `isthmus join`, as people start them."""

    def __init__(self, folder: Path, save_every: int = 0) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "run")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        (folder / "fleet.toml").write_text(FLEET)
        self.job = edited(
            write_job(folder, steps=STEPS, fleet=str(folder / "fleet.toml")),
            ("save_every = 3\n", f"save_every = {save_every}\n"),
            ("[learning_rate]", RUNTIME),
        )
        self._started: list[subprocess.Popen[str]] = []

    def serve(self, *options: str) -> subprocess.Popen[str]:
        return self._start(
            "serve",
            str(self.job),
            "--port",
            str(self._port),
            "--state",
            str(self.folder / "fleet"),
            "--run",
            str(self.run.path),
            *options,
        )

    def join(self, name: str, ticket: str) -> subprocess.Popen[str]:
        path = self.folder / f"{name}.ticket"
        path.touch(0o600)
        path.write_text(ticket)
        return self._join(name, "--ticket-file", str(path))

    def join_again(self, name: str) -> subprocess.Popen[str]:
        """One that has its certificate already."""
        return self._join(name)

    def _join(self, name: str, *options: str) -> subprocess.Popen[str]:
        state = str(self.folder / name)
        return self._start("join", "--name", name, *options, "--state", state, "--timeout", "5 s")

    def _start(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / f"{words[0]}.err").open("a") as err:
            process = subprocess.Popen(
                [*COMMAND, *words],
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=self.folder,
                start_new_session=True,
                env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
            )
        self._started.append(process)
        return process

    def newest(self) -> int:
        """The last step that was told, which may lie before one that was lost."""
        found = [p.step for p in self.run.losses() if p.split == "train"]
        return found[-1] if found else 0

    def steps(self) -> int:
        return max((p.step for p in self.run.losses()), default=0)

    def description(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in self.folder.glob("*.err"))

    def end(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.end()


@pytest.mark.long
def test_the_coordinator_is_killed_and_comes_back(machines: Machines) -> None:
    serve = machines.serve("--tickets", "2")
    assert serve.stdout is not None
    for name in ("d0", "d1"):
        machines.join(name, serve.stdout.readline().strip())
    wait_until(lambda: machines.steps() >= 30, serve, within_s=200)  # on a machine with ten times as much to do
    os.kill(serve.pid, signal.SIGKILL)
    serve.wait(60)
    reached = machines.steps()
    again = machines.serve("--tickets", "0", "--resume")
    assert again.wait(200) == 0, machines.description()
    points = [p.step for p in machines.run.losses() if p.split == "train"]
    assert points == sorted(set(points)) and points[-1] == STEPS, "no step is told twice"
    unreported = set(range(1, STEPS + 1)) - set(points)
    assert unreported <= {reached + 1, reached + 2, reached + 3}, "what the devices did while nobody listened"
    told = machines.description()
    assert "from the devices' memory" in told, told
    assert told.count("capturing") == 1, "its graphs are in the run's folder"
    went_on = next(line for line in told.splitlines() if "resuming after step" in line)
    assert int(went_on.partition("after step ")[2].split()[0]) >= reached - 1, (went_on, reached)
