"""A wish to stop: what is under way comes to a good end. Ctrl-C is one, and so is whatever else asks politely."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

from isthmus.errors import Interrupted


class Stop:
    """The wish, from any thread or signal handler. Whoever does the work looks at it, or is called.

    >>> stop = Stop()
    >>> with stop.calls(lambda: print("coming to an end")):
    ...     stop.request()
    coming to an end
    >>> stop.requested
    True
    """

    def __init__(self) -> None:
        self._requested = False  # no Event: a signal handler may come while this thread holds its lock
        self._listeners: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        return self._requested

    def request(self) -> None:
        self._requested = True
        for listener in list(self._listeners):
            listener()

    def check(self) -> None:
        """Raises Interrupted where it was requested: where there is nothing to bring to a good end."""
        if self._requested:
            raise Interrupted("interrupted")

    @contextlib.contextmanager
    def calls(self, act: Callable[[], None]) -> Generator[None]:
        """Inside, a request calls `act` once, in whatever thread it comes from; one that was made before does so at
        once. In the main thread Ctrl-C is a request, and a second one raises KeyboardInterrupt."""
        once = [act]

        def listener() -> None:
            with contextlib.suppress(IndexError):
                once.pop()()

        self._listeners.append(listener)
        try:
            with interruptible(self.request):
                if self._requested:
                    listener()
                yield
        finally:
            self._listeners.remove(listener)


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
