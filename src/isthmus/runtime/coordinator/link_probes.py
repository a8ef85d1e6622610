"""Probes in the background whether a slow link that is no longer used has recovered."""

from __future__ import annotations

import queue
import threading

from isthmus.runtime.coordinator.backend import Session
from isthmus.runtime.coordinator.run_callbacks import RunCallbacks


class LinkProbes:
    def __init__(self, callbacks: RunCallbacks) -> None:
        self._callbacks = callbacks
        self._found: queue.SimpleQueue[tuple[tuple[str, str], float | None]] = queue.SimpleQueue()
        """Links that were tried, and how fast they are."""

    def look(self, work: Session, *, running: bool) -> bool:
        """Whether a trial found that devices or links are not as the plan assumed; begins the next that is due."""
        current_status = not self._found.empty() and self._callbacks.tried(*self._found.get())
        if running and (link := self._callbacks.to_try()) is not None:
            threading.Thread(target=self._try, args=(link, work), name="probe", daemon=True).start()
        return current_status

    def _try(self, link: tuple[str, str], work: Session) -> None:
        found = None
        try:
            found = self._callbacks.emulated(link)
            found = work.bandwidth(*link) if found is None else found
        finally:  # nothing found, whatever the reason: another try comes later
            self._found.put((link, found))
