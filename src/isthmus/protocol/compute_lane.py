"""The compute lane of a device, shared by its stages: one piece of work at a time, the rest waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Begin = Callable[[], None]


class ComputeLane:
    """Backward goes before forward, weight gradients go last, and a later stage before an earlier one, as inside a
    worker: that drains the pipeline, so no two stages of one device wait for each other."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: list[tuple[int, int, int, Begin]] = []
        self._count = 0

    @property
    def waiting(self) -> int:
        """Pieces of work that wait."""
        return len(self._waiting)

    def take(self, name: str, worker: int, begin: Begin) -> None:
        """Begin now, or when the lane is free and nothing of higher priority waits."""
        if not self._busy:
            self._busy = True
            begin()
            return
        self._count += 1
        heapq.heappush(self._waiting, ({"B": 0, "W": 2}.get(name, 1), -worker, self._count, begin))

    def release(self) -> None:
        """The work at hand is done."""
        self._busy = bool(self._waiting)
        if self._waiting:
            heapq.heappop(self._waiting)[-1]()
