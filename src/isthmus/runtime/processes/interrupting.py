"""Ctrl-C as an event: what is under way may come to a good end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator


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
        interrupted()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
