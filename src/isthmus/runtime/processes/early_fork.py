"""A fork server that is a copy of this process, made by a command before it has threads: torch is imported already.

It serves one run after another: an agent's next run begins without an import. Where none was made, or where it does not
fit, device processes come from a fork server with an interpreter of its own.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial

import setproctitle

from isthmus.runtime.processes.fork_server import DEVICES, ForkServer
from isthmus.runtime.processes.forked import forked_copy, handle_signals

_standing: EarlyForkServer | None = None


class EarlyForkServer(ForkServer):
    """Does not end with a run whose processes have all ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:  # no super: nothing is started
        self.command = tuple(command)
        self.environment = dict(environment)
        self.in_use = False
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            safe = "-P" in command
            process = _Copy(forked_copy(partial(_serve, line, theirs, self.environment, safe=safe)))
        self._serves(line, process)

    def end(self) -> None:
        self.in_use = False
        if self.gone or not self.all_ended:
            super().end()


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


def fork_early(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """For device processes that will be wanted from an interpreter with this command line and environment. Nothing
    happens where this process already has threads."""
    global _standing
    if _standing is None and threading.active_count() == 1 and hasattr(os, "pidfd_open"):
        _standing = EarlyForkServer(command, environment)


def standing_for(command: Sequence[str], environment: Mapping[str, str]) -> ForkServer | None:
    """The early one, if it is idle and like a fork server that would be started so."""
    found = _standing
    if found is None or found.in_use or found.gone:
        return None
    if (found.command, found.environment) != (tuple(command), dict(environment)):
        return None
    found.in_use = True
    return found


def _serve(line: socket.socket, theirs: socket.socket, environment: Mapping[str, str], *, safe: bool) -> None:
    """In the copy: as a new interpreter would. What devices need beyond torch is imported when the first is wanted."""
    os.setpgid(0, 0)
    handle_signals(signal.SIG_IGN)
    setproctitle.setproctitle("isthmus fork server")  # which works no more once the environment was changed
    line.close()
    os.dup2(theirs.fileno(), 0)
    theirs.close()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # stdout is the parent's data
    os.close(nothing)
    os.environ.update(environment)
    sys.path[:1] = [] if safe else [os.getcwd()]
    select.select([0], [], [])
    importlib.import_module(DEVICES).main()
