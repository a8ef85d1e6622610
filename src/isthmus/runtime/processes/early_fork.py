"""A fork server that is a copy of this process, made by a command before it has threads: torch is imported already.

It serves one run after another: an agent's next run begins without an import. Where none was made, or where it does not
fit, device processes come from a fork server with an interpreter of its own.
"""

from __future__ import annotations

import atexit
import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from isthmus.copies import forked_copy, handle_signals
from isthmus.runtime.processes.fork_server import DEVICES, ForkServer

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
