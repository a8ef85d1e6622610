"""An open phase of a round: who holds which clients, who is idle, and from whom clients are taken."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from isthmus.programs.merging import OpenMerge, Why
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    ClientTime,
    ExecutorOrder,
    LinearFit,
    PhaseClosed,
    PhaseId,
    RefusedUpdate,
    SumsSent,
    TasksGranted,
    TasksRecalled,
)
from isthmus.protocol.federated_scheduler import ClientScheduler


@dataclass(kw_only=True)
class OpenPhase(OpenMerge):
    """One pass of one attempt at a round. Clients change hands while it is open: to idle executors, from lost ones.
    `held` are clients given out and not yet reported: the coordinator is not told when one begins."""

    phase: PhaseId
    scheduler: ClientScheduler
    notify: Callable[[str, ExecutorOrder], None]
    steals: bool  # whether executors that have clients left give some to idle ones
    held: dict[str, dict[int, ClientTask]] = field(default_factory=dict)
    unassigned: list[ClientTask] = field(default_factory=list)  # not given to anybody yet, the largest first
    idle: dict[str, None] = field(default_factory=dict)  # executors that wait for clients, longest first
    recalls: dict[str, str] = field(default_factory=dict)  # who is asked to give back, for whom
    timed: dict[str, list[ClientTime]] = field(default_factory=dict)
    refused: list[RefusedUpdate] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    late: dict[str, tuple[PhaseId, ClientTask]] = field(default_factory=dict)
    """Sites that still train for an earlier phase: their updates count here when they come."""
    stale: list[tuple[int, int]] = field(default_factory=list)  # (client, rounds late) of those that came
    stolen: int = 0
    predicted_s: float | None = None
    bound_s: float | None = None
    _out: int = 0  # clients that are held: counted as they come and go, for there may be a million
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

    def void(self, reason: str) -> None:
        """No update that is in is of use."""
        self.done, self.reasons = 0, [*self.reasons, reason]

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

    def lose(self, executor: str) -> list[ClientTask]:
        """Its clients; the phase goes on without it."""
        self.idle.pop(executor, None)
        self._given.pop(executor, None)
        held = self.held.pop(executor, {})
        self._out -= len(held)
        return list(held.values())

    # Clients that change hands

    def grant(self, executor: str, tasks: tuple[ClientTask, ...]) -> None:
        self.idle.pop(executor, None)
        self.give(executor, tasks)
        self.notify(executor, TasksGranted(phase=self.phase, tasks=tasks, holds=self.steals))

    def assign_idle(self) -> None:
        """Ask others for idle executors, or close these: nothing that has not begun is left."""
        asked_for = set(self.recalls.values())
        for thief in [name for name in self.idle if name not in asked_for]:
            if self.unassigned:
                self.grant(thief, (self.unassigned.pop(0),))
            elif (victim := self._victim(thief)) is not None:
                self.recalls[victim] = thief
                lines = self.scheduler.line(victim), self.scheduler.line(thief)
                self.notify(victim, TasksRecalled(phase=self.phase, own=lines[0], thief=lines[1]))
            elif not self.recalls:
                del self.idle[thief]
                self.notify(thief, PhaseClosed(phase=self.phase))

    def returned(self, victim: str, tasks: tuple[ClientTask, ...]) -> bool:
        """The clients that a victim gave back go to the thief, if the thief is still idle; False for others than it was
        given."""
        thief = self.recalls.pop(victim, None)
        if thief is None or not self.take(victim, tasks):
            return False
        if tasks and thief in self.idle:
            self.stolen += len(tasks)
            self.grant(thief, tasks)
        else:
            self.unassigned += tasks
        self.assign_idle()
        return True

    def forget(self, executor: str) -> list[ClientTask]:
        """The clients that a lost executor held."""
        self.recalls.pop(executor, None)  # the thief is still idle
        for victim in [v for v, thief in self.recalls.items() if thief == executor]:
            self.recalls[victim] = ""  # the clients that it gives back are unassigned
        return self.lose(executor)

    def reassign(self, tasks: Sequence[ClientTask], names: Sequence[str]) -> None:
        """Assign each client of a lost executor to the executor that finishes it first. An executor that has already
        sent its sums sends sums again."""
        load_s = {name: self._load_s(name) for name in names}
        given: dict[str, list[ClientTask]] = {}
        for task in sorted(tasks, key=lambda t: -t.samples):
            ends_s = {n: load_s[n] + self.scheduler.seconds(task, n) for n in names}
            name = min(names, key=ends_s.__getitem__)
            load_s[name] = ends_s[name]
            given.setdefault(name, []).append(task)
        for name, mine in given.items():
            self.grant(name, tuple(mine))
        self.assign_idle()

    def _count(self, executor: str, clients: int, samples: int) -> None:
        before = self._given.get(executor, (0, 0))
        self._given[executor] = (before[0] + clients, before[1] + samples)

    def _look_again(self, executor: str) -> None:
        if self._richest is not None:
            heapq.heappush(self._richest, (-self._load_s(executor), executor))

    def _load_s(self, executor: str) -> float:
        """Return the seconds that the clients given to the executor take, by its line."""
        clients, samples = self._given.get(executor, (0, 0))
        line = self.scheduler.line(executor)
        return samples * line.seconds_per_sample + clients * line.fixed_s

    def _victim(self, thief: str) -> str | None:
        """Return who has most, of those that were not asked since they were last given clients; asked now."""
        if self._richest is None:
            self._richest = [(-self._load_s(name), name) for name in self._given]
            heapq.heapify(self._richest)
        waiting: list[tuple[float, str]] = []
        found = None
        while self._richest and found is None:
            entry = heapq.heappop(self._richest)
            name = entry[1]
            if -entry[0] != self._load_s(name) or name in self.idle or len(self.held.get(name, ())) < 2:
                continue  # an entry of before, or nothing that has not begun
            if name in self.recalls or name == thief:
                waiting.append(entry)
                continue
            found = name
        for entry in waiting:
            heapq.heappush(self._richest, entry)
        return found


MOST_STATES = 2**31
MOST_REFUSALS = 3  # refused clients that a run's last line names


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a round: exactly which updates are in it."""

    round: int
    attempt: int
    trained: Mapping[str, tuple[ClientTime, ...]]  # the clients that each executor trained in the last pass
    earlier_s: Mapping[str, float] = {}
    """Seconds that each executor trained in the passes before that one; empty for algorithms of one pass."""
    refused: tuple[RefusedUpdate, ...] = ()
    missing: tuple[int, ...] = ()  # clients of the cohort that neither came, in all passes, nor were refused
    predicted_s: float | None = None  # the makespan that was planned; None while nothing was known of the executors
    bound_s: float | None = None
    lines: Mapping[str, LinearFit] = {}
    """The estimated time of each executor when the round was planned; empty while nothing was known."""
    stolen: int = 0  # clients that changed hands
    stale: tuple[tuple[int, int], ...] = ()  # (client, rounds late) of updates that were made for a round before
    closed_by: Why = "all"


def refusal_texts(refused: Sequence[RefusedUpdate]) -> list[str]:
    """Return the first few refusals, each with its client."""
    few = [f"client {r.client}: {r.reason.removeprefix(f'client {r.client}: ')}" for r in refused[:MOST_REFUSALS]]
    return [*few, f"and {len(refused) - MOST_REFUSALS} clients more"] if len(refused) > MOST_REFUSALS else few


def fault_of(event: SumsSent, held: Mapping[int, ClientTask]) -> str | None:
    """Return the fault of an executor's report of the clients that it was given; None if it has none."""
    reported = [t.client for t in event.timed] + [r.client for r in event.refused]
    if not set(reported) <= held.keys():
        return "reported clients that it was not given"
    if len(set(reported)) < len(reported):
        return "reported a client twice"
    if wrong := [t for t in event.timed if t.samples != held[t.client].samples]:
        got, expected = wrong[0], held[wrong[0].client].samples
        return f"reported {got.samples} samples of client {got.client}, expected {expected}"
    if any(not 0 <= t.seconds < math.inf for t in event.timed):
        return "reported a time that is none"
    if any(not NONE <= t.state < MOST_STATES for t in event.timed):
        return "reported a state that is none"
    return None


def has_diverged(opened: OpenPhase, why: Why) -> bool:
    """Return whether every client of the phase was trained, and none to finite numbers."""
    everyone = why == "all" and not opened.done and not opened.reasons
    return everyone and bool(opened.refused) and all(refusal.diverged for refusal in opened.refused)


def record_of(
    opened: OpenPhase,
    passed: Sequence[OpenPhase],
    asked: Sequence[int],
    *,
    lines: Mapping[str, LinearFit],
    late: Mapping[int, int],
    why: Why,
) -> RoundRecord:
    """Return the record of a round whose last pass is over, after those that `passed`. `asked` are its clients; `late`
    gives the rounds that clients of a simulation are late."""
    trained = {t.client for timed in opened.timed.values() for t in timed}
    refusals = [r for one in (*passed, opened) for r in one.refused]
    refused = {r.client for r in refusals}
    earlier_s: dict[str, float] = {}
    for name, timed in ((name, timed) for one in passed for name, timed in one.timed.items()):
        earlier_s[name] = earlier_s.get(name, 0.0) + sum(t.seconds for t in timed)
    return RoundRecord(
        round=opened.phase.round,
        attempt=opened.phase.attempt,
        trained={name: tuple(timed) for name, timed in opened.timed.items() if timed},
        earlier_s=earlier_s,
        refused=tuple(refusals),
        missing=tuple(c for c in asked if c not in trained and c not in refused),
        predicted_s=opened.predicted_s,
        bound_s=opened.bound_s,
        lines=lines,
        stolen=opened.stolen,
        closed_by=why,
        stale=(*opened.stale, *((c, rounds) for c, rounds in late.items() if rounds and c in trained)),
    )
