"""Ctrl-C as an event: what is under way may come to a good end. Whoever asks politely otherwise gets the same."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

_taken: list[None] = []
"""One for each Ctrl-C that became an event."""


def interruptions() -> int:
    """How many there were: what was interrupted may end in another way, and whoever began it wants to know."""
    return len(_taken)


@contextlib.contextmanager
def interruptible(interrupted: Callable[[], None]) -> Generator[None]:
    """The first Ctrl-C calls `interrupted`, a second one raises. In other threads than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        # Not `previous`: a process that was started in the background inherits a Ctrl-C that is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _taken.append(None)
        interrupted()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def terminable() -> Generator[None]:
    """SIGTERM does what Ctrl-C does: a supervisor's `stop` or a bare `kill` means no other thing. By its default state
    would be left lying, and the first process of a container is not even ended by it. In other threads than the main
    one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        # Not SIGINT sent to ourselves: a process that was started in the background ignores it.
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
