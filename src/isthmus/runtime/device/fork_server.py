"""The process that device processes are forked from: it has imported what they need.

A fresh interpreter imports torch for two seconds of a core, and for more than another one what torch imports when the
first optimizer is made; a copy of one that has done so takes milliseconds, and shares its memory. It has one thread,
ever: a lock that another one held at the fork would stay locked in the copy. So nothing is computed here, as torch
would start threads.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
from functools import partial

import msgspec
import setproctitle

from isthmus.runtime.device import process
from isthmus.runtime.processes.fork_server import MESSAGE_BYTES, Exited, Spawned, SpawnRequest
from isthmus.runtime.processes.forked import end_after


def main() -> None:
    """Until the launcher at the other end of standard input is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("isthmus fork server")
    line = socket.socket(fileno=0)
    importlib.import_module("torch._dynamo")  # or the first optimizer does, for a second, in every copy
    gc.freeze()  # collecting in a copy would write to every page
    numbers: dict[int, int] = {}
    with selectors.DefaultSelector() as waiting, contextlib.suppress(OSError):
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
                    end_after(partial(_live, request, descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
                numbers[pid] = request.number
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _send(line, Spawned(request.number, pid))


def _send(line: socket.socket, what: Spawned | Exited) -> None:
    line.send(msgspec.json.encode(what))


def _live(request: SpawnRequest, descriptors: list[int]) -> None:
    """What the copy does with its life."""
    os.setpgid(0, 0)
    for target, descriptor in zip((0, 2), descriptors, strict=False):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request.folder is not None:
        os.chdir(request.folder)
    os.environ["ISTHMUS_RUN"] = request.run
    setproctitle.setproctitle(request.title)
    process.main(request.arguments)


if __name__ == "__main__":
    main()
