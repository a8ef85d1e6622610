"""Start device processes on this machine, and end them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from isthmus.runtime.processes.fork_server import ForkedProcess, ForkServer, fork_early, standing_for
from isthmus.runtime.processes.forked import HALT_S, end_children, how_it_ended, kill_child
from isthmus.runtime.processes.place import ProcessOptions, ProcessPlace
from isthmus.wire_types import WorkerRole


def fork_before_threads(*, fleet: bool = False) -> None:
    """For a command that will start devices, those of a run here or of a `fleet`, with a thread each: their fork server
    is a copy of this process. Before the command has threads, files or an accelerator open."""
    place = ProcessPlace(identity=Path() if fleet else None)
    fork_early((sys.executable, *place.safety()), _environment(1))


class ForkServers:
    """Processes that device processes are forked from, by their command line and environment. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], ForkServer] = {}

    def get(self, command: tuple[str, ...], environment: Mapping[str, str], log: int | None) -> ForkServer:
        """The one that is there, or a new one."""
        key = command, frozenset(environment.items())
        with self._lock:
            if key not in self._found or self._found[key].gone:
                self._found[key] = standing_for(command, environment) or ForkServer(command, environment, log)
            return self._found[key]

    def end(self) -> None:
        """Their children end when their parent-death pipes close."""
        for fork_server in self._found.values():
            fork_server.end()
        self._found.clear()


class DeviceProcesses:
    """Device processes, by device name. A context manager: on leaving, whatever still runs is ended.

    They are forked from one process per place that has imported what they need (`fork_server`). They hold the other
    end of a pipe each, so they end with this one even when it is killed. They have process groups of their own: Ctrl-C
    reaches the coordinator alone, which halts them.
    """

    def __init__(
        self,
        coordinator: str,
        run: str,
        *,
        timeout_s: float = 60.0,
        threads: int = 1,
        logs: Path | None = None,
        fork_servers: ForkServers | None = None,
    ) -> None:
        """`coordinator` is HOST:PORT as the devices reach it; under `logs` goes what they write to standard error.
        `fork_servers` are kept at the end; None: new ones are made, and ended."""
        self._coordinator = coordinator
        self._run = run
        self._timeout_s = timeout_s
        self._logs = logs
        self._kept = fork_servers
        self._fork_servers = fork_servers or ForkServers()
        self._children: dict[str, ForkedProcess] = {}
        self._environment = _environment(threads)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)

    def start(self, device: str, place: ProcessPlace, stages: int = 1, *, role: WorkerRole = "stage") -> None:
        """Start its process, which takes so many stages at once. One of it that still runs is ended; its log goes
        on."""
        before = self._children.get(device)
        if before is not None:
            kill_child(before)
        given = ProcessOptions(
            coordinator=self._coordinator,
            device=device,
            timeout_s=self._timeout_s,
            stages=stages,
            role=role,
            place=place,
        )
        with contextlib.ExitStack() as stack:
            mode = "wb" if before is None else "ab"
            log = stack.enter_context(self._log(device).open(mode)).fileno() if self._logs is not None else None
            command = (*place.prefix, sys.executable, *place.safety())
            fork_server = self._fork_servers.get(command, self._environment, log)
            self._children[device] = fork_server.spawn(
                [given.encoded()], f"isthmus device {device}", self._run, place.data, log
            )

    def running(self, device: str) -> bool:
        return device in self._children and self._children[device].poll() is None

    @property
    def any_runs(self) -> bool:
        return any(map(self.running, self._children))

    def started(self, device: str) -> bool:
        return device in self._children

    def _log(self, device: str) -> Path:
        assert self._logs is not None, "asked for with logs only"
        return self._logs / f"{quote(device, safe=' ')}.log"

    def ended(self) -> dict[str, str]:
        """Devices whose process has ended otherwise than well, and how."""
        codes = {device: child.poll() for device, child in self._children.items()}
        return {d: how_it_ended(code, self._logs and self._log(d)) for d, code in codes.items() if code}

    def __enter__(self) -> DeviceProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(halted=kind is None)

    def end(self, *, halted: bool = True) -> None:
        """End the processes that still run. With `halted`, they were asked to halt, and first get the time to do so."""
        end_children(self._children.values(), HALT_S if halted else 0.0)
        if self._kept is None:
            self._fork_servers.end()


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
