"""Processes that this one started: how they are ended, how they ended, and how they end with this one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from isthmus.errors import PeerError

HALT_S = 5.0  # how long processes that were asked to halt may take
SIGNAL_S = 2.0  # how long a process may take after a signal

LEAVE_S = 10.0  # how long a process may take to end by itself after its standard input closed


class Child(Protocol):
    """A process that holds the other end of its parent-death pipe: it ends when that closes."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, or has not begun."""
        ...

    def lives(self) -> bool:
        """Return whether the process exists now."""
        ...

    def signal(self, number: int) -> None:
        """Nothing happens where it does not exist."""

    def let_go(self) -> None:
        """Close its parent-death pipe."""


def end_children(children: Collection[Child], within_s: float = 0.0) -> None:
    """End those that still run; `within_s`: for so long they may end by themselves first, as they were asked to."""
    wait_for_children(children, within_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            child.signal(number)
        wait_for_children(children, SIGNAL_S)
    for child in children:
        child.let_go()


def kill_child(child: Child) -> None:
    """At once: another takes its place."""
    child.signal(signal.SIGKILL)
    child.let_go()
    wait_for_children([child], SIGNAL_S)


def wait_for_children(children: Collection[Child], timeout_s: float) -> None:
    """For all of them together."""
    deadline_s = time.monotonic() + timeout_s
    while any(child.lives() for child in children) and time.monotonic() < deadline_s:
        time.sleep(0.005)


def how_it_ended(code: int, log: Path | None) -> str:
    """Return how a process with this exit code, not 0, ended."""
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    see = f", see {log}" if log is not None else ""
    return f"its process ended with code {code}{see}"


def end_with_input() -> None:
    """Have this process end when standard input closes: as by SIGTERM, and at once where that takes longer than
    `LEAVE_S`. Nothing else may read standard input from now on."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVE_S)
        os._exit(PeerError.exit_code)

    threading.Thread(target=wait, name="standard input", daemon=True).start()
