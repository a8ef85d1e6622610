"""What a launcher and the process that it has device processes forked from say to each other; the launcher's side.

One `SpawnRequest` per device process, with two descriptors: the end of a pipe that becomes its standard input, and a
file that
becomes its standard error. Both sides are processes of one user on one machine, over a socket that nobody else has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.errors import UserError
from isthmus.extensions import import_extra

MESSAGE_BYTES = 1 << 16


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """A process of `isthmus.runtime.device.process`, please."""

    number: int
    arguments: tuple[str, ...]
    title: str
    """What `ps` shows."""
    run: str
    """The run's secret name: an environment is for its owner to read, a command line for everybody."""
    folder: str | None
    """Where it runs; None: here."""


class Spawned(msgspec.Struct, frozen=True, tag=True):
    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    number: int
    code: int
    """As subprocess has it: a signal's number below zero."""


class ForkServer:
    """The process that forks: `isthmus.runtime.device.fork_server`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: int | None) -> None:
        """`command` starts a Python interpreter, in whatever place. `log` is a descriptor for what that process itself
        writes to standard error."""
        import_extra("setproctitle", "a device process")
        if not hasattr(os, "pidfd_open"):
            raise UserError("device processes: got a system without pidfd_open, expected Linux")
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*command, "-m", "isthmus.runtime.device.fork_server"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=dict(environment),
                process_group=0,
            )
        self._spawned = 0
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    @property
    def gone(self) -> bool:
        self._receive()
        return self._line.fileno() < 0

    def spawn(
        self, arguments: Sequence[str], title: str, run: str, folder: Path | None, log: int | None
    ) -> ForkedProcess:
        """Does not wait: the first child comes when this process has imported what all of them need."""
        self._spawned += 1
        where = None if folder is None else str(folder.absolute())
        request = SpawnRequest(self._spawned, tuple(arguments), title, run, where)
        end, parent_pipe = os.pipe()
        try:
            with contextlib.suppress(OSError):  # it is gone, which its children's codes tell
                socket.send_fds(self._line, [msgspec.json.encode(request)], [end] if log is None else [end, log])
        finally:
            os.close(end)
        return ForkedProcess(self, request.number, parent_pipe)

    def code(self, number: int) -> int | None:
        """None while it runs, or has still to be born."""
        self._receive()
        return self._codes.get(number)

    def lives(self, number: int) -> bool:
        return self.code(number) is None and number in self._pids

    def signal(self, number: int, what: int) -> None:
        if self.lives(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[number], what)

    def end(self) -> None:
        """Nothing is born any more. Its children end as their leashes are let go of."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> None:
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
        """The process is gone, and nobody would tell how its children end: they end now."""
        self._line.close()
        code = self._process.wait()
        for number in set(range(1, self._spawned + 1)) - self._codes.keys():
            if number in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[number], signal.SIGKILL)
            self._codes[number] = -signal.SIGKILL if number in self._pids else code or 1


class ForkedProcess:
    """A device process. It ends when its parent pipe closes, also by the end of this process."""

    def __init__(self, fork_server: ForkServer, number: int, parent_pipe: int) -> None:
        self._fork_server = fork_server
        self._number = number
        self._parent_pipe: int | None = parent_pipe

    def poll(self) -> int | None:
        """Its exit code, a signal's number below zero; None while it runs."""
        return self._fork_server.code(self._number)

    def lives(self) -> bool:
        """Whether there is a process, now."""
        return self._fork_server.lives(self._number)

    def signal(self, number: int) -> None:
        self._fork_server.signal(self._number, number)

    def let_go(self) -> None:
        parent_pipe, self._parent_pipe = self._parent_pipe, None
        if parent_pipe is not None:
            os.close(parent_pipe)
