"""How a process ends: requests to stop, by Ctrl-C, SIGTERM or a call, let the work under way finish; threads that
compute end before the interpreter does, as one that is in torch or a solver then aborts the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import FrameType

from isthmus.errors import Interrupted


class Stop:
    """A request to stop, from any thread or signal handler. Running work polls it, or registers a callback.

    >>> stop = Stop()
    >>> with stop.calls(lambda: print("stopping")):
    ...     stop.request()
    stopping
    >>> stop.requested
    True
    """

    def __init__(self) -> None:
        self.reason = ""  # empty where the first request gave none, as Ctrl-C does
        self._requested = False  # no Event: a signal handler may come while this thread holds its lock
        self._listeners: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """True once `request` was called."""
        return self._requested

    def request(self, reason: str = "") -> None:
        """End the run with a checkpoint. From any thread; a second call changes nothing."""
        if not self._requested:
            self.reason, self._requested = reason, True
        for listener in list(self._listeners):
            listener()

    def check(self) -> None:
        """Raises Interrupted if a stop was requested. For code that has no work to finish."""
        if self._requested:
            raise Interrupted("interrupted")

    @contextlib.contextmanager
    def calls(self, act: Callable[[], None]) -> Generator[None]:
        """Inside the block, a request calls `act` once, in the requesting thread. An earlier request calls it at once.
        In the main thread the first Ctrl-C is a request, and the second raises KeyboardInterrupt."""
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
    """The first Ctrl-C calls `interrupted`, the second raises KeyboardInterrupt. No effect outside the main thread."""
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
def uninterrupted() -> Generator[None]:
    """Neither Ctrl-C nor SIGTERM (`terminable`) ends the block. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


AGAIN_S = 0.02


@contextlib.contextmanager
def terminable() -> Generator[None]:
    """SIGTERM acts like Ctrl-C, so a supervisor's `stop` and a plain `kill` end the process cleanly. By default SIGTERM
    would leave state behind, and would not end the first process of a container at all. No effect outside the main
    thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        # Not SIGINT sent to ourselves: a process that was started in the background ignores it.
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    hook = sys.unraisablehook

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        # In the callback of a weak reference, and in `__del__`, Python ignores exceptions: a request to end as well.
        # It comes again a moment later, as here it would be ignored too.
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            hook(unraisable)

    previous = signal.signal(signal.SIGTERM, interrupt)
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, previous)


LONGEST_S = 10.0


class ComputeThreads:
    """The threads of one owner, who ends them at the end of the process or when nobody waits for them any more."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, act: Callable[[], None], name: str) -> threading.Thread:
        """Call `act` in a thread of its own."""

        def until_ended() -> None:
            with suppress(SystemExit):
                act()

        thread = threading.Thread(target=until_ended, name=name, daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()
        return thread

    def end(self, within_s: float = LONGEST_S) -> bool:
        """Raise SystemExit in each, as Ctrl-C raises KeyboardInterrupt in the main thread, and wait until it has ended;
        whether all have.

        Nothing can be raised inside an operator: it ends at the next line of Python, or is left after `within_s`.
        """
        until_s = time.monotonic() + within_s
        for thread in self._threads:
            while thread.is_alive() and thread.ident is not None and time.monotonic() < until_s:
                # Once more where something on its way swallowed the last one.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
                thread.join(min(0.5, within_s))
        return not any(thread.is_alive() for thread in self._threads)
