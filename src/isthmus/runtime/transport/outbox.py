"""Things to do in the order in which they were put, by whichever thread comes by.

A thread that decides under a lock puts what may take long, lets go of the lock, and then works it off. No other thread
has to wake up for that, which would take as long as a small round.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Act = Callable[[], object]


class Outbox:
    def __init__(self) -> None:
        self._waiting: deque[Act] = deque()
        self._working = threading.Lock()

    def put(self, act: Act) -> None:
        """Never waits. Any thread, and under any lock."""
        self._waiting.append(act)

    def work(self) -> None:
        """Do what waits. Returns at once where another thread is at it, which then does this too."""
        while self._waiting and self._working.acquire(blocking=False):
            self._work()

    def finish(self) -> None:
        """Do what waits, and wait for another thread that is at it."""
        self._working.acquire()
        self._work()

    def _work(self) -> None:
        """The caller has the lock."""
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._working.release()
