"""A fork server's side of the protocol (`fork_server`): it forks itself, and reports how its copies end."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
from collections.abc import Callable
from functools import partial

import msgspec
import setproctitle

from isthmus.copies import end_after
from isthmus.runtime.processes.fork_server import MESSAGE_BYTES, Exited, Spawned, SpawnRequest


def serve_forks(live: Callable[[SpawnRequest], None], title: str) -> None:
    """Until the launcher at the other end of standard input is gone. Each copy calls `live`, and ends.

    What copies need is imported before. This process has one thread, ever: a lock that another one held at the fork
    would stay locked in the copy.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle(title)
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
                    end_after(partial(_live, live, request, descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
                numbers[pid] = request.number
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _send(line, Spawned(request.number, pid))


def _send(line: socket.socket, what: Spawned | Exited) -> None:
    line.send(msgspec.json.encode(what))


def _live(live: Callable[[SpawnRequest], None], request: SpawnRequest, descriptors: list[int]) -> None:
    """Run the copy's work, in a process group of its own."""
    os.setpgid(0, 0)
    for target, descriptor in zip((0, 2), descriptors, strict=False):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request.folder is not None:
        os.chdir(request.folder)
    setproctitle.setproctitle(request.title)
    live(request)
