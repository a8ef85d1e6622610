"""The messages between a launcher and its fork server, and the launcher's side of the protocol.

One `SpawnRequest` per device process, with two descriptors: the end of a pipe that becomes its standard input, and a
file that becomes its standard error. Both sides are processes of one user on one machine. No other process has their
socket.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.errors import UserError
from isthmus.extensions import import_extra

MESSAGE_BYTES = 1 << 16
DEVICES = "isthmus.runtime.device_fork_server"  # the module that forks device processes


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """Launcher to fork server: fork a process with this command line."""

    number: int
    arguments: tuple[str, ...]
    title: str  # process title, shown by `ps`
    run: str
    """The run's secret name. It is passed in the environment, which only the owner can read, unlike a command line."""
    folder: str | None  # working directory; None for the current one


class Spawned(msgspec.Struct, frozen=True, tag=True):
    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    number: int
    code: int  # exit code as in `subprocess`: negative for a signal


class _Process(Protocol):
    """A process with the methods of `subprocess.Popen` that are used."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


class ForkServer:
    """The launcher's handle of a fork server process (`fork_service`)."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: int | None,
        module: str = DEVICES,
    ) -> None:
        """`command` starts a Python interpreter, on the host or in a container or namespace; `module` calls
        `serve_forks`. `log` is a descriptor for the fork server's own standard error. UserError on systems other than
        Linux."""
        import_extra("setproctitle", "a device process")
        if not hasattr(os, "pidfd_open"):
            system = platform.system()
            raise UserError(f"device processes: got {system}, which has no pidfd_open, expected Linux 5.3 or newer")
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [*command, "-m", module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=dict(environment),
                process_group=0,
            )
        self._serves(line, process)

    def _serves(self, line: socket.socket, process: _Process) -> None:
        self._line = line
        self._process = process
        self._lock = threading.RLock()  # several runs may have their processes from here
        self._spawned = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    @property
    def gone(self) -> bool:
        self._receive()
        return self._line.fileno() < 0

    @property
    def all_ended(self) -> bool:
        return all(self.code(number) is not None for number in range(1, self._spawned + 1))

    def spawn(
        self, arguments: Sequence[str], title: str, run: str, folder: Path | None, log: int | None
    ) -> ForkedProcess:
        """Request a process without waiting for it. The first one starts after the fork server's imports."""
        with self._lock:
            self._spawned += 1
            number = self._spawned
        where = None if folder is None else str(folder.absolute())
        request = SpawnRequest(number, tuple(arguments), title, run, where)
        end, parent_pipe = os.pipe()
        try:
            with contextlib.suppress(OSError):  # it is gone: `code` reports that for its children
                socket.send_fds(self._line, [msgspec.json.encode(request)], [end] if log is None else [end, log])
        finally:
            os.close(end)
        return ForkedProcess(self, request.number, parent_pipe)

    def code(self, number: int) -> int | None:
        """The exit code of process `number`; None while it runs or is not spawned yet."""
        self._receive()
        return self._codes.get(number)

    def lives(self, number: int) -> bool:
        return self.code(number) is None and number in self._pids

    def signal(self, number: int, what: int) -> None:
        if self.lives(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[number], what)

    def end(self) -> None:
        """End the fork server. Its children end when their parent-death pipes close."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> None:
        with self._lock:
            self._receive_all()

    def _receive_all(self) -> None:
        while self._line.fileno() >= 0:
            try:
                said = self._line.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            if not said:
                self._notify_exits()
                return
            received: Spawned | Exited = msgspec.json.decode(said, type=Spawned | Exited)
            match received:
                case Spawned(number=number, pid=pid):
                    self._pids[number] = pid
                case Exited(number=number, code=code):
                    self._codes[number] = code

    def _notify_exits(self) -> None:
        """The fork server is gone and can no longer report exit codes: kill its children now."""
        self._line.close()
        code = self._process.wait()
        for number in set(range(1, self._spawned + 1)) - self._codes.keys():
            if number in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[number], signal.SIGKILL)
            self._codes[number] = -signal.SIGKILL if number in self._pids else code or 1


class ForkedProcess:
    """A device process. It ends when its parent-death pipe closes, also when this process ends."""

    def __init__(self, fork_server: ForkServer, number: int, parent_pipe: int) -> None:
        self._fork_server = fork_server
        self._number = number
        self._parent_pipe: int | None = parent_pipe

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._fork_server.code(self._number)

    def lives(self) -> bool:
        """Return whether the process exists now."""
        return self._fork_server.lives(self._number)

    def signal(self, number: int) -> None:
        self._fork_server.signal(self._number, number)

    def write(self, data: bytes) -> None:
        """To its standard input; nothing where it has ended."""
        if self._parent_pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._parent_pipe, data)

    def let_go(self) -> None:
        parent_pipe, self._parent_pipe = self._parent_pipe, None
        if parent_pipe is not None:
            os.close(parent_pipe)
