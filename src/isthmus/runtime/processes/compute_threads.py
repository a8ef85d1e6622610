"""Threads that compute, ended before the interpreter ends: one that is in torch or a solver then aborts the process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress

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
