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
from isthmus.runtime.processes.births import MESSAGE_BYTES, Birth, Born, Died
from isthmus.runtime.processes.forked import end_after


def main() -> None:
    """Until the launcher at the other end of standard input is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("isthmus nursery")
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
                    _say(line, Died(numbers.pop(key.data), os.waitstatus_to_exitcode(status)))
                    continue
                said, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 2)
                if not said:
                    return
                birth = msgspec.json.decode(said, type=Birth)
                pid = os.fork()
                if not pid:
                    waiting.close()
                    line.detach()
                    end_after(partial(_live, birth, descriptors))
                for descriptor in descriptors:
                    os.close(descriptor)
                numbers[pid] = birth.number
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _say(line, Born(birth.number, pid))


def _say(line: socket.socket, what: Born | Died) -> None:
    line.send(msgspec.json.encode(what))


def _live(birth: Birth, descriptors: list[int]) -> None:
    """What the copy does with its life."""
    os.setpgid(0, 0)
    for target, descriptor in zip((0, 2), descriptors, strict=False):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if birth.folder is not None:
        os.chdir(birth.folder)
    os.environ["ISTHMUS_RUN"] = birth.run
    setproctitle.setproctitle(birth.title)
    process.main(birth.arguments)


if __name__ == "__main__":
    main()
