"""When a link that was slow, and that no plan uses since, is tried again: ever less often while it stays slow.

What the work itself shows is measured all the time (`drift`). This is for what no work shows: a plan avoids a slow
link, and would avoid it for ever, as nothing tells that it has recovered. A try is a probe of some seconds beside the
work, on a link that carries nothing; no weights move for it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

MOST_S = 3600.0
"""Between two tries, at most: each wait is twice the one before."""
Pair = tuple[str, str]
"""A link's source and target."""


class _Wait(NamedTuple):
    until_s: float
    wait_s: float


class LinkReprobe:
    """One try at a time, the first after `first_s`."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._waits: dict[Pair, _Wait] = {}
        self._trying: Pair | None = None

    def due(self, doubtful: Collection[Pair], now_s: float) -> Pair | None:
        """Which of the links that are believed slow and carry nothing to try now; it is tried then."""
        self._waits = {
            pair: self._waits.get(pair, _Wait(now_s + self._first_s, self._first_s)) for pair in sorted(doubtful)
        }
        if self._trying is not None:
            return None
        ready = [(wait.until_s, pair) for pair, wait in self._waits.items() if wait.until_s <= now_s]
        self._trying = min(ready)[1] if ready else None
        return self._trying

    def tried(self, pair: Pair, now_s: float) -> None:
        """If it is as slow as before it is tried again, later."""
        self._trying = None
        if (wait := self._waits.get(pair)) is not None:
            wait_s = min(2 * wait.wait_s, MOST_S)
            self._waits[pair] = _Wait(now_s + wait_s, wait_s)
