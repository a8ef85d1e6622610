"""Open resources are closed before the interpreter ends, within bounds.

A thread that waits in torch when Python finalizes may be woken then: Python ends it by unwinding its stack, and C++
aborts the process on the way. So no such thread may be left when the exit handlers have run.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Protocol

TIMEOUT_S = 10.0
"""For what is on the way at the end of a script. After an error nobody waits: the other workers should hear of it."""


class OpenResource(Protocol):
    """Something that keeps a thread."""

    def leave(self, timeout_s: float) -> None:
        """End it: what is on its way has so long to arrive."""


_OPEN: dict[OpenResource, None] = {}


def opened(one: OpenResource) -> None:
    """From now on it is ended at the interpreter's end, unless it was closed before."""
    _OPEN[one] = None


def closed(one: OpenResource) -> None:
    _OPEN.pop(one, None)


def _leave_all() -> None:
    failed = getattr(sys, "last_value", None) is not None
    until_s = time.monotonic() + (0.0 if failed else TIMEOUT_S)
    for one in list(_OPEN):
        try:
            one.leave(max(0.0, until_s - time.monotonic()))
        except KeyboardInterrupt:
            until_s = 0.0
            one.leave(0.0)


atexit.register(_leave_all)
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_OPEN.clear)  # threads stay with the parent
