"""Processes that this one started: how they are ended, how they ended, and how they end with this one.

Those that begin as copies of this one: nothing is imported or read again, and memory is shared until written. A fresh
interpreter imports torch for seconds; a fork takes milliseconds. It must come before this process has threads: a lock
that a thread holds at that moment stays locked in the copy.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from isthmus.copies import end_with_parent, forked_copy, handle_signals
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


class _Copy:
    """A forked process, as a `Child`."""

    def __init__(self, pid: int, parent_pipe: int) -> None:
        self.pid = pid
        self.parent_pipe = parent_pipe
        self._code: int | None = None
        self._looks = threading.Lock()

    def poll(self) -> int | None:
        with self._looks:  # two threads may look: to the second there would be no such child
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def lives(self) -> bool:
        return self.poll() is None

    def signal(self, number: int) -> None:
        if self.lives():
            os.kill(self.pid, number)

    def let_go(self) -> None:
        os.close(self.parent_pipe)


class Forked:
    """Forked copies of this process by name. Each waits until it receives an address. A context manager: on exit it
    ends the copies that still run. They end with this process even if it is killed."""

    def __init__(self, names: Mapping[str, Callable[[str], None]], logs: Path) -> None:
        """Each copy calls its function with the address. Under `logs` goes what it writes to standard error."""
        logs.mkdir(parents=True, exist_ok=True)
        self._copies: dict[str, _Copy] = {}
        self._logs = {name: logs / f"{name}.log" for name in names}
        gc.freeze()  # collecting in a copy would write to every page
        for name, act in names.items():
            end, parent_pipe = os.pipe()
            # A copy that held other ends of pipes would keep its siblings alive.
            unused = [parent_pipe, *(other.parent_pipe for other in self._copies.values())]
            pid = forked_copy(partial(_live, act, end, self._logs[name], unused))
            os.close(end)
            self._copies[name] = _Copy(pid, parent_pipe)
        gc.unfreeze()

    def begin(self, address: str) -> None:
        """Tell all of them."""
        for copy in self._copies.values():
            with contextlib.suppress(BrokenPipeError):
                os.write(copy.parent_pipe, address.encode() + b"\n")

    def ended(self) -> dict[str, str]:
        """Those that have ended other than well, and how."""
        codes = {name: copy.poll() for name, copy in self._copies.items()}
        return {name: how_it_ended(code, self._logs[name]) for name, code in codes.items() if code}

    def pids(self) -> dict[str, int]:
        return {name: copy.pid for name, copy in self._copies.items()}

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_children(self._copies.values(), HALT_S if kind is None else 0.0)  # after an error nobody told them


def _live(act: Callable[[str], None], parent_pipe: int, log: Path, unused: Sequence[int]) -> None:
    """Run the copy's work once the parent has sent the address; return without it if the parent has ended."""
    for descriptor in unused:
        os.close(descriptor)
    os.setpgid(0, 0)  # Ctrl-C is the parent's to handle
    handle_signals(signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 2)
    os.dup2(output, 1)  # stdout is the parent's data
    address = bytearray()
    while not address.endswith(b"\n"):
        read = os.read(parent_pipe, 256)
        if not read:
            return  # nobody is left to work for
        address += read
    threading.Thread(target=end_with_parent, args=(parent_pipe,), name="parent_pipe", daemon=True).start()
    act(address.decode().strip())
