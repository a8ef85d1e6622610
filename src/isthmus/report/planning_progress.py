"""Planning as it goes, for people, on standard error: a live line on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from isthmus.report.live import still_live
from isthmus.sanitize import sanitize
from isthmus.units import format_duration

QUIET_S = 2.0
"""A search that ends within that says nothing."""
REFRESH_S = 0.25
PLAIN_AFTER_S, PLAIN_EVERY_S = 5.0, 10.0


class PlanningProgress:
    """A context manager and an observer of planners: it says what is searched, how far it is and what was found.

    `end` asks the search to end. A planner that was never heard of cannot, which it says.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live = still_live(console)
        self._began_s = clock()
        self._due_s = self._began_s + (PLAIN_AFTER_S if self._live is None else QUIET_S)
        self._planner, self._part = "", ""
        self._candidates = 0
        self._best_s: float | None = None
        self._heard = False
        self._ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def planning(self, name: str) -> None:
        self._planner, self._part = name, ""
        self._candidates, self._best_s, self._heard = 0, None, False

    def part(self, words: str) -> None:
        self._part = words

    def looked_at(self, candidates: int) -> None:
        self._heard = True
        self._candidates += candidates

    def found(self, step_s: float) -> None:
        self._best_s = step_s

    def stopped(self) -> bool:
        return self._ending

    def end(self) -> bool:
        self._ending = self._heard
        return self._heard

    def show(self) -> None:
        """Called now and then, by another thread than the planner's: that may be in a solver."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + (PLAIN_EVERY_S if self._live is None else REFRESH_S)
            self._log(now_s)

    def _log(self, now_s: float) -> None:
        best = "no plan yet" if self._best_s is None else f"best step so far {format_duration(self._best_s)}"
        what = [part for part in (self._planner, self._part) if part]
        took = format_duration(now_s - self._began_s)
        facts = [f"planning: {self._candidates:,} plans tried", best, took, *(["ending"] if self._ending else [])]
        details = f" ({sanitize(', '.join(what))})" if what else ""
        text = Text(", ".join(facts), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._console.print(text.append(details), soft_wrap=True, highlight=False)
            return
        self._live.start()  # nothing is shown of a search that ends sooner
        text.append("; Ctrl-C takes the best so far" if self._best_s is not None else "; Ctrl-C ends it", "dim")
        text.append(details, "dim")  # last: a narrow window cuts it
        self._live.update(text, refresh=True)
