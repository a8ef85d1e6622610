"""docs/two-machines.md, executed: its steps' commands as they stand, on two emulated machines, or on loopback where
network namespaces are not allowed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus_testing.lab import Lab, lab_unavailable

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
DOCUMENTED_ADDRESS = "192.0.2.10"


class Place(NamedTuple):
    """Where the commands run."""

    prefix: Callable[[str], list[str]]
    """The words that begin a command of the machine with this name."""
    typed: Callable[[str], str]
    """A command of the page with what is different here."""


@pytest.fixture
def place() -> Iterator[Place]:
    if lab_unavailable():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        yield Place(lambda machine: [], lambda command: _on_loopback(command, port))
        return
    machines = tuple(
        Device(name=n, region=f"at-{n}", flops_per_s=1e9, memory_bytes=1 << 30) for n in ("first", "second")
    )
    with Lab(Fleet(name="two", devices=machines, links=Links(default=Link(0.005, 1e7)))) as lab:
        yield Place(lab.command, lambda command: command.replace(DOCUMENTED_ADDRESS, lab.addresses["first"]))


def _on_loopback(command: str, port: int) -> str:
    """On a free port: another program may have the one that is usual."""
    for address in (DOCUMENTED_ADDRESS, "0.0.0.0"):
        command = command.replace(address, "127.0.0.1")
    return f"{command} --port {port}" if command.startswith("isthmus serve") else command


class Machines:
    """Two machines with a home each, and the checkout in the folder where commands run."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / "examples").symlink_to(ROOT / "examples")

    def start(self, machine: str, command: str, pasted: str = "") -> subprocess.Popen[str]:
        words = shlex.split(self.place.typed(command))
        assert words[0] == "isthmus"
        home = self.folder / machine
        home.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [*self.place.prefix(machine), sys.executable, "-m", "isthmus", *words[1:]],
            cwd=self.folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{words[1]}-{machine}.err").open("a"),
            env={**os.environ, "XDG_STATE_HOME": str(home), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        )
        self.started.append(process)
        assert process.stdin is not None
        process.stdin.write(pasted)
        process.stdin.close()
        return process

    def description(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in self.folder.glob("*.err"))

    def end(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in self.started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)


def _line(process: subprocess.Popen[str]) -> str:
    """Byte by byte: a buffer would swallow the next line too, which `select` then does not see."""
    assert process.stdout is not None
    found = b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        assert ready, "it printed nothing"
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, f"it ended after {found!r}"
        found += byte
    return found.decode()


@pytest.mark.long
def test_the_steps(place: Place, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "two-machines.md").read_text(encoding="utf-8")
    steps = page.partition("\n## Steps\n")[2].partition("\n## ")[0]
    serve, desk, laptop, devices = re.findall(r"^isthmus .*$", steps, re.MULTILINE)
    machines = Machines(place, tmp_path)
    try:
        coordinator = machines.start("first", serve)
        tickets = [_line(coordinator) for _ in range(2)]
        assert all(ticket.startswith("isthmus1-") for ticket in tickets), machines.description()
        machines.start("first", desk, tickets[0])
        machines.start("second", laptop, tickets[1])
        deadline_s = time.monotonic() + LIMIT_S
        while coordinator.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert coordinator.returncode == 0, machines.description()
        assert len((tmp_path / "runs" / "two-machines" / "losses.jsonl").read_text().splitlines()) == 40
        listed = machines.start("first", devices)
        assert listed.wait(30) == 0 and listed.stdout is not None
        names = listed.stdout.read()
        assert "desk" in names and "laptop" in names
        everything = machines.description() + "".join(
            path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()
        )
        assert not any(ticket.strip() in everything for ticket in tickets), "a secret was written down"
    finally:
        machines.end()
