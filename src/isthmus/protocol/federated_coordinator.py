"""The federated coordinator: which clients, on which executor, and when a round is over. Events in, instructions out.

    joining ──all joined──► turn open ──all in, quorum, or deadline──► absorb ──last pass──► commit ──► next round
                                │                                          └──► next pass, same cohort
                                └──too few at the deadline──► dropped, tried again

An executor that is lost takes the sums it held with it: its clients go to the others. An executor that runs out of
clients takes those that another has not begun; as sums are exact and random streams belong to clients, who trained
whom changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.planners.cohort import Schedule
from isthmus.protocol.federated_events import (
    Absorb,
    Closed,
    Commit,
    CoordinatorEvent,
    CoordinatorInstruction,
    Drained,
    Dropped,
    Finish,
    Granted,
    Halt,
    Ignore,
    Interrupted,
    Joined,
    Line,
    Lost,
    Merge,
    Open,
    Opening,
    Recalled,
    Record,
    Returned,
    Summed,
    Task,
    Tell,
    Tick,
    Turn,
    TurnOpened,
)
from isthmus.protocol.federated_pace import Pace
from isthmus.protocol.federated_turn import OpenTurn

Integers = NDArray[np.int64]


class RoundRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's rounds go."""

    rounds: int
    first_round: int = 0
    passes: int = 1
    needed: int = 1
    """Clients that a round wants; more may be asked (over-selection)."""
    quorum: float = 1.0
    minimum: int = 1
    deadline_s: float = 600.0
    attempts: int = 3
    planner: str = "certified"
    warm_up_rounds: int = 0
    """So many first rounds are scheduled by number of clients alone (Parrot's R_w)."""
    steals: bool = True
    single: bool = False
    """One client at a time, its result back at once (the FA scheme)."""


class CoordinatorStatistics(msgspec.Struct, frozen=True):
    phase: Literal["joining", "running", "done"]
    round: int
    alive: int
    stale: int


@dataclass(frozen=True, eq=False)
class _Ahead:
    """A schedule that was made before its round."""

    round: int
    alive: tuple[str, ...]
    cohort: Integers
    schedule: Schedule

    def fits(self, round_: int, alive: Sequence[str], members: Integers) -> bool:
        """A second pass may have fewer clients, and executors may have been lost meanwhile."""
        same = self.round == round_ and self.alive == tuple(alive)
        return same and np.array_equal(self.cohort, members)


class FederatedCoordinator:
    """The machine. It keeps which round wrote each client's state: 4 bytes a client, part of what a commit saves."""

    def __init__(
        self,
        executors: Iterable[str],
        rules: RoundRules,
        sizes: Integers,
        cohort: Callable[[int], Integers],
        pace: Pace,
        *,
        state_rounds: NDArray[np.int32] | None = None,
    ) -> None:
        """`sizes` (population,) in samples; `cohort` gives the clients of a round; `state_rounds` (population,) is
        None for algorithms that keep nothing."""
        self.executors = tuple(executors)
        self.state_rounds = state_rounds
        self.pace = pace
        self.durable_round = rules.first_round - 1
        """Set by the driver when a round has reached the disk."""
        self._rules = rules
        self._sizes = sizes
        self._cohort_of = cohort
        self._number = {name: number for number, name in enumerate(self.executors)}
        self._pinned: dict[str, int] = {}
        self._alive: set[str] = set()
        self._phase: Literal["joining", "running", "done"] = "joining"
        self._round = rules.first_round
        self._cohort: Integers = np.empty(0, dtype=np.int64)
        self._open: OpenTurn | None = None
        self._ahead: _Ahead | None = None
        self._now_s = 0.0
        self._stale = 0

    def statistics(self) -> CoordinatorStatistics:
        return CoordinatorStatistics(self._phase, self._round, len(self._alive), self._stale)

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorInstruction]:
        """Take one event; return what to do now, in this order."""
        if self._phase == "done":
            return [Ignore(event.executor, event.turn)] if isinstance(event, Summed) else []
        match event:
            case Joined():
                return self._join(event)
            case Lost(executor=executor, reason=reason):
                return self._lose(executor, reason)
            case Tick(now_s=now_s):
                self._now_s = now_s
                return self._look()
            case Interrupted():
                return self._end("interrupted")
            case Drained() | Returned() | Summed():
                if self._open is None or event.turn != self._open.turn or event.executor not in self._alive:
                    self._stale += 1
                    return [Ignore(event.executor, event.turn)] if isinstance(event, Summed) else []
                return self._in_turn(event, self._open)

    def look_ahead(self) -> None:
        """Plan the next round while this one trains: its cohort is known, and times that are a round older do.

        For a driver that has nothing else to do; without it, a round is planned when it is opened.
        """
        following = self._round + 1
        if self._phase != "running" or self._pinned or following >= self._rules.rounds:
            return
        alive = tuple(name for name in self.executors if name in self._alive)
        members = self._cohort_of(following)
        self._ahead = _Ahead(following, alive, members, self._schedule(following, members, alive))

    def _schedule(self, round_: int, members: Integers, alive: Sequence[str]) -> Schedule:
        early = round_ - self._rules.first_round < self._rules.warm_up_rounds
        planner = "uniform" if early else self._rules.planner
        sizes = self._sizes[members].astype(np.float64)
        return self.pace.schedule(planner, sizes, (self._number[name] for name in alive))

    def _join(self, event: Joined) -> list[CoordinatorInstruction]:
        self._alive.add(event.executor)
        if event.client is not None:
            self._pinned[event.executor] = event.client
        if self._phase != "joining" or len(self._alive) < len(self.executors):
            return []
        self._phase = "running"
        return self._open_round()

    # A turn's beginning

    def _open_round(self) -> list[CoordinatorInstruction]:
        if self._round >= self._rules.rounds:
            return self._end("done")
        self._cohort = self._cohort_of(self._round)
        return self._open_turn(Turn(self._round))

    def _open_turn(self, turn: Turn) -> list[CoordinatorInstruction]:
        alive = [name for name in self.executors if name in self._alive]
        tasks, schedule = self._deal(alive)
        clients = sum(map(len, tasks.values()))
        opened = OpenTurn(turn=turn, opened_s=self._now_s, needed=min(self._rules.needed, clients), line=self._line)
        if schedule is not None and self.pace.known:
            opened.predicted_s, opened.bound_s = schedule.makespan_s, schedule.lower_bound_s
            opened.believed = {name: self._line(name) for name in alive}
        self._open = opened
        opening = Opening(
            turn=turn, clients=len(self._cohort), samples=int(self._sizes[self._cohort].sum()),
            durable_round=self.durable_round,
        )  # fmt: skip
        out: list[CoordinatorInstruction] = []
        holds = self._steals
        for name in alive:
            mine = tasks.get(name, ())
            if self._rules.single:
                opened.spare += mine[1:]
                mine = mine[:1]
            if not mine and not holds:
                continue  # nothing to train, nothing to say
            opened.give(name, mine)
            out.append(Open(name, TurnOpened(opening=opening, tasks=mine, holds=holds)))
        opened.spare.sort(key=lambda t: -t.samples)
        return out if clients else [*out, *self._close_turn("all")]

    @property
    def _steals(self) -> bool:
        """Not where each has the data of one client, nor where every result is sent back by itself."""
        return self._rules.steals and not self._pinned and not self._rules.single

    def _deal(self, alive: list[str]) -> tuple[Mapping[str, tuple[Task, ...]], Schedule | None]:
        """Every executor's tasks, the largest first: what may be stolen at the end is small."""
        if self._pinned:
            chosen = set(self._cohort.tolist())
            mine = {name: self._pinned[name] for name in alive if self._pinned.get(name) in chosen}
            return {name: (self._task(client),) for name, client in mine.items()}, None
        ahead = self._ahead
        if ahead is not None and ahead.fits(self._round, alive, self._cohort):
            schedule = ahead.schedule
        else:
            schedule = self._schedule(self._round, self._cohort, alive)
        sizes = self._sizes[self._cohort]
        dealt: dict[str, tuple[Task, ...]] = {}
        for name, places in zip(alive, schedule.clients_of(), strict=True):
            order = places[np.argsort(-sizes[places], kind="stable")]
            dealt[name] = tuple(self._task(client) for client in self._cohort[order].tolist())
        return dealt, schedule

    def _line(self, executor: str) -> Line:
        return self.pace.line(self._number[executor])

    def _task(self, client: int) -> Task:
        kept = -1 if self.state_rounds is None else int(self.state_rounds[client])
        return Task(client, int(self._sizes[client]), kept)

    # While it is open

    def _in_turn(self, event: Drained | Returned | Summed, opened: OpenTurn) -> list[CoordinatorInstruction]:
        match event:
            case Drained(executor=executor):
                opened.idle[executor] = None
                return self._feed_idle(opened)
            case Returned(executor=executor, tasks=tasks):
                return self._on_returned(executor, tasks, opened)
            case Summed():
                return self._on_summed(event, opened)

    def _feed_idle(self, opened: OpenTurn) -> list[CoordinatorInstruction]:
        """Ask others for idle executors, or close these: nothing that has not begun is left."""
        out: list[CoordinatorInstruction] = []
        asked_for = set(opened.recalls.values())
        for thief in [name for name in opened.idle if name not in asked_for]:
            if opened.spare:
                out.append(self._grant(thief, (opened.spare.pop(0),), opened))
            elif (victim := opened.victim(thief)) is not None:
                opened.recalls[victim] = thief
                recalled = Recalled(turn=opened.turn, own=self._line(victim), thief=self._line(thief))
                out.append(Tell(victim, recalled))
            elif not opened.recalls:
                del opened.idle[thief]
                out.append(Tell(thief, Closed(turn=opened.turn)))
        return out

    def _on_returned(self, victim: str, tasks: tuple[Task, ...], opened: OpenTurn) -> list[CoordinatorInstruction]:
        thief = opened.recalls.pop(victim, None)
        if not opened.take(victim, tasks):
            return self._lose(victim, "gave back clients that it was not given")
        out: list[CoordinatorInstruction] = []
        if tasks and thief in opened.idle:
            opened.stolen += len(tasks)
            out.append(self._grant(thief, tasks, opened))
        else:
            opened.spare += tasks
        return [*out, *self._feed_idle(opened)]

    def _grant(self, executor: str, tasks: tuple[Task, ...], opened: OpenTurn) -> Tell:
        opened.idle.pop(executor, None)
        opened.give(executor, tasks)
        return Tell(executor, Granted(turn=opened.turn, tasks=tasks, holds=self._steals))

    def _on_summed(self, event: Summed, opened: OpenTurn) -> list[CoordinatorInstruction]:
        held = opened.held.get(event.executor, {})
        reported = {t.client for t in event.timed} | {r.client for r in event.refused}
        if not reported <= held.keys():
            lost = self._lose(event.executor, "reported clients that it was not given")
            return [Ignore(event.executor, event.turn), *lost]
        for client in reported:
            del held[client]
        opened.timed.setdefault(event.executor, []).extend(event.timed)
        opened.refused += event.refused
        out: list[CoordinatorInstruction] = [Merge(event.executor, event.turn)]
        if self._rules.single and opened.spare:
            out.append(self._grant(event.executor, (opened.spare.pop(0),), opened))
        return [*out, *self._look()]

    def _look(self) -> list[CoordinatorInstruction]:
        """Whether the turn is over."""
        opened = self._open
        if opened is None:
            return []
        if not opened.outstanding:
            return self._close_turn("all")
        done = opened.done
        if self._rules.quorum < 1 or opened.needed < opened.outstanding + done:
            enough = max(self._rules.minimum, round(self._rules.quorum * opened.needed))
            if done >= enough:
                return self._close_turn("quorum")
        if self._now_s - opened.opened_s >= self._rules.deadline_s:
            return self._close_turn("deadline")
        return []

    # Its end

    def _close_turn(self, why: Literal["all", "quorum", "deadline"]) -> list[CoordinatorInstruction]:
        opened, self._open = self._open, None
        assert opened is not None
        turn = opened.turn
        out: list[CoordinatorInstruction] = []
        there = [name for name in opened.held if name in self._alive]
        if opened.done < self._rules.minimum:
            out += [Tell(name, Dropped(turn=turn)) for name in there]
            if turn.attempt + 1 >= self._rules.attempts:
                what = f"round {turn.round}: {opened.done} clients were in after {turn.attempt + 1} attempts"
                return [*out, *self._end("lost", "; ".join([what, *opened.reasons]))]
            return [*out, *self._open_turn(Turn(turn.round, turn.attempt + 1, turn.number))]
        for name in there:
            if opened.held[name]:  # what it may send yet comes too late
                kept = tuple(t.client for t in opened.timed.get(name, ()))
                out.append(Tell(name, Dropped(turn=turn, kept=kept)))
        out.append(Absorb(turn))
        for name, timed in opened.timed.items():
            self.pace.record(turn.round, self._number[name], timed)
        trained = {t.client for timed in opened.timed.values() for t in timed}
        if turn.number + 1 < self._rules.passes:
            self._cohort = np.array(sorted(trained), dtype=np.int64)
            return [*out, *self._open_turn(Turn(turn.round, turn.attempt, turn.number + 1))]
        return [*out, *self._commit(opened, trained, why)]

    def _commit(
        self, opened: OpenTurn, trained: set[int], why: Literal["all", "quorum", "deadline"]
    ) -> list[CoordinatorInstruction]:
        if self.state_rounds is not None:
            self.state_rounds[sorted(trained)] = self._round
        refused = {r.client for r in opened.refused}
        record = Record(
            round=self._round, attempt=opened.turn.attempt,
            trained={name: tuple(timed) for name, timed in opened.timed.items() if timed},
            refused=tuple(opened.refused),
            missing=tuple(c for c in self._cohort.tolist() if c not in trained and c not in refused),
            predicted_s=opened.predicted_s, bound_s=opened.bound_s,
            lines=opened.believed, stolen=opened.stolen, closed_by=why,
        )  # fmt: skip
        self._round += 1
        return [Commit(record), *self._open_round()]

    # Losses

    def _lose(self, executor: str, reason: str) -> list[CoordinatorInstruction]:
        joining = self._phase == "joining"
        if executor not in self._alive and not joining:
            return []
        self._alive.discard(executor)
        if not self._alive or joining:
            return self._end("lost", f"executor {executor!r} was lost: {reason}")
        opened = self._open
        if opened is None:
            return []
        opened.reasons.append(f"executor {executor!r}: {reason}")
        opened.recalls.pop(executor, None)  # whoever it was asked for is idle still
        for victim in [v for v, thief in opened.recalls.items() if thief == executor]:
            opened.recalls[victim] = ""  # what it gives back will be spare
        homeless = opened.lose(executor)
        if self._pinned or not homeless:
            return [*self._feed_idle(opened), *self._look()]
        return self._rehouse(homeless, opened)

    def _rehouse(self, tasks: list[Task], opened: OpenTurn) -> list[CoordinatorInstruction]:
        """Clients of a lost executor, each to whom it ends soonest with. Whoever has sent its sums sends more."""
        names = [name for name in self.executors if name in self._alive and name in opened.held]
        if not names:
            return self._retry(opened)  # nobody who is left has the turn's broadcast
        load_s = {name: opened.load_s(name) for name in names}
        given: dict[str, list[Task]] = {}
        for task in sorted(tasks, key=lambda t: -t.samples):
            name = min(names, key=lambda n: load_s[n] + self._line(n).seconds(task.samples))
            load_s[name] += self._line(name).seconds(task.samples)
            given.setdefault(name, []).append(task)
        out: list[CoordinatorInstruction] = [self._grant(name, tuple(mine), opened) for name, mine in given.items()]
        return [*out, *self._feed_idle(opened)]

    def _retry(self, opened: OpenTurn) -> list[CoordinatorInstruction]:
        self._open = None
        turn = opened.turn
        return self._open_turn(Turn(turn.round, turn.attempt + 1, turn.number))

    def _end(self, outcome: Literal["done", "interrupted", "lost"], reason: str = "") -> list[CoordinatorInstruction]:
        self._phase, self._open = "done", None
        return [Halt(), Finish(outcome, reason)]
