"""Whether a link that was slow, and carries nothing since, has recovered: tried beside the work."""

from __future__ import annotations

import queue
import threading

from isthmus.runtime.conducting.crew import Work
from isthmus.runtime.conducting.script import Script


class LinkTrials:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._found: queue.SimpleQueue[tuple[tuple[str, str], float | None]] = queue.SimpleQueue()
        """Links that were tried, and how fast they are."""

    def look(self, work: Work, *, running: bool) -> bool:
        """Whether a trial found that devices or links are not as the plan assumed; begins the next that is due."""
        news = not self._found.empty() and self._script.tried(*self._found.get())
        if running and (link := self._script.to_try()) is not None:
            threading.Thread(target=self._try, args=(link, work), name="probe", daemon=True).start()
        return news

    def _try(self, link: tuple[str, str], work: Work) -> None:
        found = None
        try:
            found = self._script.emulated(link)
            found = work.bandwidth(*link) if found is None else found
        finally:  # nothing found, whatever the reason: another try comes later
            self._found.put((link, found))
