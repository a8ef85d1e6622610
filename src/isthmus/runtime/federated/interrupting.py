"""Ending a thread that computes before the interpreter ends: one that is in torch then aborts the process."""

from __future__ import annotations

import ctypes
import threading
import time

LONGEST_S = 10.0


def interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in it, as Ctrl-C raises KeyboardInterrupt in the main thread, and wait until it has ended.

    Nothing can be raised inside an operator: it ends at the next line of Python, or is left after ten seconds.
    """
    until_s = time.monotonic() + LONGEST_S
    while thread.is_alive() and thread.ident is not None and time.monotonic() < until_s:
        # Once more where something on its way swallowed the last one.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        thread.join(0.5)
