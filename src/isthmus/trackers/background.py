"""A tracker in a thread of its own: the run waits for it at its end only, and not for long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import cast

from isthmus.trackers.tracker import Tracker

MOST_WAITING = 4096  # figures of so many steps wait for a tracker that is slow; those of more are left out
DRAIN_S = 30.0  # so long the end of a run waits for trackers

Act = Callable[[Tracker], None]


class BackgroundTracker:
    """Its calls, in their order. What one raises ends the tracker, and `complaint` says so once."""

    def __init__(self, name: str, build: Callable[[], object], most_waiting: int = MOST_WAITING) -> None:
        self.name = name
        self._build = build
        self._most_waiting = most_waiting
        self._waiting: deque[Act] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._failed = False
        self._left_out = 0
        self._complaints: deque[str] = deque()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def put(self, act: Act, *, figures: bool = False) -> None:
        """To be done. `figures` may be left out where too many wait. The thread begins with the first of them, or by
        `begin`."""
        with self._changed:
            if self._failed or self._ending:
                return
            if figures and len(self._waiting) >= self._most_waiting:
                self._left_out += 1
                return
            self._waiting.append(act)
            self._changed.notify()
        if figures:
            self.begin()

    def begin(self) -> None:
        """Its thread, with the library. Not before a process that will fork has done so."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Nothing more is put."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self.begin()  # a run of no step

    def wait(self, timeout_s: float) -> None:
        """For what was put, after `end`."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._complaints.append("is not done in time: what it has not written is lost")
        elif self._left_out and not self._failed:
            self._complaints.append(f"is slower than the run: figures of {self._left_out} steps were left out")

    def complaint(self) -> str:
        """Return a complaint for people, once; else an empty text."""
        return f"tracker {self.name} {self._complaints.popleft()}" if self._complaints else ""

    def _run(self) -> None:
        try:
            tracker = cast("Tracker", self._build())
            while (act := self._next()) is not None:
                act(tracker)
        except BaseException as e:  # SystemExit too: a library may not end the run
            with self._changed:
                self._failed = True
                self._waiting.clear()
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self._complaints.append(f"failed, and gets nothing more: {reason[:300]}")

    def _next(self) -> Act | None:
        """None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None
