"""A fork server: a process that forks itself, and reports how its copies end; the messages between it and its launcher,
and the launcher's side of the protocol.

One `SpawnRequest` per device process, with two descriptors: the end of a pipe that becomes its standard input, and a
file that becomes its standard error. Both sides are processes of one user on one machine. No other process has their
socket.

A fork server that is a copy of this process, made by a command before it has threads: torch is imported already.

It serves one run after another: an agent's next run begins without an import. Where none was made, or where it does not
fit, device processes come from a fork server with an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import platform
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from isthmus.copies import end_after, forked_copy, handle_signals
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


_standing: EarlyForkServer | None = None


class _Like(NamedTuple):
    """The interpreter that it is in place of."""

    command: tuple[str, ...]
    environment: dict[str, str]
    module: str


class EarlyForkServer(ForkServer):
    """Does not end with a run whose processes have all ended."""

    def __init__(self, like: _Like) -> None:  # no super: no interpreter is started
        self.like = like
        self.owner = os.getpid()  # copies of this process have the handle too, but may not use it
        self.in_use = False
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = _Copy(forked_copy(partial(_serve, line, theirs, like)))
        self._serves(line, process)

    def end(self) -> None:
        self.in_use = False
        if self.gone or not self.all_ended:
            super().end()

    def close(self) -> None:
        """Close it, as the end of this process would."""
        if self.owner == os.getpid():
            self._line.close()


class _Copy:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


def fork_early(command: Sequence[str], environment: Mapping[str, str], module: str = DEVICES) -> None:
    """In place of a fork server that will be wanted, with this command line, environment and module. Nothing happens
    where this process has other threads."""
    global _standing
    able = hasattr(os, "pidfd_open") and find_spec("setproctitle") is not None
    none = _standing is None or _standing.owner != os.getpid()
    if able and none and threading.active_count() == 1:
        _standing = EarlyForkServer(_Like(tuple(command), dict(environment), module))
        atexit.register(_standing.close)


def standing_for(command: Sequence[str], environment: Mapping[str, str], module: str = DEVICES) -> ForkServer | None:
    """The early one, if it is idle and like a fork server that would be started so."""
    found = _standing
    if (
        found is None
        or found.owner != os.getpid()
        or found.in_use
        or found.gone
        or found.like != (tuple(command), dict(environment), module)
    ):
        return None
    found.in_use = True
    return found


def _serve(line: socket.socket, theirs: socket.socket, like: _Like) -> None:
    """In the copy: as a new interpreter would. What is needed beyond torch is imported with the first request."""
    os.setpgid(0, 0)
    handle_signals(signal.SIG_IGN)
    # Once the environment was changed a title cannot be set any more.
    importlib.import_module("setproctitle").setproctitle("isthmus fork server")
    line.close()
    os.dup2(theirs.fileno(), 0)
    theirs.close()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # stdout is the parent's data
    os.close(nothing)
    os.environ.update(like.environment)
    if "-P" in like.command:
        sys.path[:] = safe_path(sys.path)
    select.select([0], [], [])
    importlib.import_module(like.module).main()


def safe_path(path: Sequence[str]) -> list[str]:
    """Where modules are looked for but in the current folder, as by `python -P`: there too if PYTHONPATH names it."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in path if os.path.abspath(entry) != os.getcwd() or (entry and entry in named)]


def serve_forks(live: Callable[[SpawnRequest], None], title: str) -> None:
    """Until the launcher at the other end of standard input is gone. Each copy calls `live`, and ends.

    What copies need is imported before. This process has one thread, ever: a lock that another one held at the fork
    would stay locked in the copy.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_extra("setproctitle", "a device process").setproctitle(title)
    gc.freeze()  # collecting in a copy would write to every page
    numbers: dict[int, int] = {}
    with socket.socket(fileno=0) as line, selectors.DefaultSelector() as waiting, contextlib.suppress(OSError):
        waiting.register(line, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not line:
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    _send(line, Exited(numbers.pop(key.data), os.waitstatus_to_exitcode(status)))
                    continue
                said, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 2)
                if not said:
                    return
                request = msgspec.json.decode(said, type=SpawnRequest)
                pid = os.fork()
                if not pid:
                    waiting.close()
                    line.detach()
                    end_after(partial(_live_as_asked, live, request, descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
                numbers[pid] = request.number
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _send(line, Spawned(request.number, pid))


def _send(line: socket.socket, what: Spawned | Exited) -> None:
    line.send(msgspec.json.encode(what))


def _live_as_asked(live: Callable[[SpawnRequest], None], request: SpawnRequest, descriptors: list[int]) -> None:
    """Run the copy's work, in a process group of its own."""
    os.setpgid(0, 0)
    for target, descriptor in zip((0, 2), descriptors, strict=False):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request.folder is not None:
        os.chdir(request.folder)
    import_extra("setproctitle", "a device process").setproctitle(request.title)
    live(request)
