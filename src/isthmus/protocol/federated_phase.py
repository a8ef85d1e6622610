"""An open phase, as the coordinator keeps it: who holds which clients, who is idle, and whom to take from."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    LinearFit,
    PhaseId,
    RefusedUpdate,
)


@dataclass(kw_only=True)
class OpenPhase:
    """`held` are clients given out and not yet reported: the coordinator is not told when one begins."""

    phase: PhaseId
    opened_s: float
    enough: int
    """Clients that close it, before the last of them is in."""
    line: Callable[[str], LinearFit]
    held: dict[str, dict[int, ClientTask]] = field(default_factory=dict)
    unassigned: list[ClientTask] = field(default_factory=list)
    """Not given to anybody yet, the largest first."""
    idle: dict[str, None] = field(default_factory=dict)
    """Executors that wait for clients, longest first."""
    recalls: dict[str, str] = field(default_factory=dict)
    """Who is asked to give back, for whom."""
    timed: dict[str, list[ClientTime]] = field(default_factory=dict)
    refused: list[RefusedUpdate] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    late: dict[str, tuple[PhaseId, ClientTask]] = field(default_factory=dict)
    """Sites that still train for an earlier phase: their updates count here when they come."""
    stale: list[tuple[int, int]] = field(default_factory=list)
    """(client, rounds late) of those that came."""
    stolen: int = 0
    predicted_s: float | None = None
    bound_s: float | None = None
    done: int = 0
    """Clients whose updates are in."""
    _out: int = 0
    """Clients that are held: counted as they come and go, for there may be a million."""
    _given: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Clients, and samples of them all: what they take is asked only where clients change hands."""
    _richest: list[tuple[float, str]] | None = None

    @property
    def outstanding(self) -> int:
        return self._out + len(self.unassigned) + len(self.late)

    def report(self, executor: str, timed: Sequence[ClientTime], refused: Sequence[RefusedUpdate]) -> None:
        """Record the clients that an executor held and reported, or one that is late."""
        held = self.held.get(executor, {})
        self._out -= sum(held.pop(one.client, None) is not None for one in (*timed, *refused))
        self.timed.setdefault(executor, []).extend(timed)
        self.refused += refused
        self.done += len(timed)

    def give(self, executor: str, tasks: Iterable[ClientTask]) -> None:
        given = {task.client: task for task in tasks}
        held = self.held.setdefault(executor, {})
        self._out -= len(held)
        held |= given
        self._out += len(held)
        self._count(executor, len(given), sum(task.samples for task in given.values()))
        self._look_again(executor)

    def take(self, executor: str, tasks: Collection[ClientTask]) -> bool:
        """Tasks that an executor gave back; False, and none is taken, for others than it was given."""
        held, clients = self.held.get(executor, {}), {task.client for task in tasks}
        if len(clients) < len(tasks) or any(held.get(task.client) != task for task in tasks):
            return False
        for task in tasks:
            del held[task.client]
            self._out -= 1
            self._count(executor, -1, -task.samples)
        if tasks:  # it may have more
            self._look_again(executor)
        return True

    def _count(self, executor: str, clients: int, samples: int) -> None:
        before = self._given.get(executor, (0, 0))
        self._given[executor] = (before[0] + clients, before[1] + samples)

    def _look_again(self, executor: str) -> None:
        if self._richest is not None:
            heapq.heappush(self._richest, (-self.load_s(executor), executor))

    def load_s(self, executor: str) -> float:
        """Return the seconds that the clients given to the executor take, by its line."""
        clients, samples = self._given.get(executor, (0, 0))
        line = self.line(executor)
        return samples * line.seconds_per_sample + clients * line.fixed_s

    def lose(self, executor: str) -> list[ClientTask]:
        """Its clients; the phase goes on without it."""
        self.idle.pop(executor, None)
        self._given.pop(executor, None)
        held = self.held.pop(executor, {})
        self._out -= len(held)
        return list(held.values())

    def victim(self, thief: str) -> str | None:
        """Who has most, of those that were not asked since they were last given clients; asked now."""
        if self._richest is None:
            self._richest = [(-self.load_s(name), name) for name in self._given]
            heapq.heapify(self._richest)
        waiting: list[tuple[float, str]] = []
        found = None
        while self._richest and found is None:
            entry = heapq.heappop(self._richest)
            name = entry[1]
            if -entry[0] != self.load_s(name) or name in self.idle or len(self.held.get(name, ())) < 2:
                continue  # an entry of before, or nothing that has not begun
            if name in self.recalls or name == thief:
                waiting.append(entry)
                continue
            found = name
        for entry in waiting:
            heapq.heappush(self._richest, entry)
        return found
