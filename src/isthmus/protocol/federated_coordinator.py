"""The federated coordinator: which clients, on which executor, and when a round is over. Events in, instructions out.

    joining ──enough here──► turn open ──all in, quorum, or deadline──► absorb ──last pass──► commit ──► next round
       ▲                          │                                          └──► next pass, same cohort
       └──too few here────────────┴──too few in──► dropped, tried again

An executor that is lost takes the sums it held with it: its clients go to the others. An executor that runs out of
clients takes those that another has not begun; as sums are exact and random streams belong to clients, who trained
whom changes no bit. Sites have a client each: their clients go to nobody, and a site that comes back is used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.protocol.federated_dealing import Dealer
from isthmus.protocol.federated_events import (
    NONE,
    Absorb,
    Commit,
    CoordinatorEvent,
    CoordinatorInstruction,
    Dismiss,
    Drained,
    Dropped,
    Finish,
    Halt,
    Ignore,
    Interrupted,
    Joined,
    Line,
    Lost,
    Merge,
    Open,
    Opening,
    Outcome,
    Record,
    Refusal,
    Refused,
    Returned,
    Summed,
    Task,
    Tell,
    Tick,
    Turn,
    TurnOpened,
)
from isthmus.protocol.federated_pace import Pace
from isthmus.protocol.federated_rules import RoundRules, Why
from isthmus.protocol.federated_sharing import feed_idle, forget_executor, grant, pass_on, rehouse
from isthmus.protocol.federated_turn import OpenTurn

Integers = NDArray[np.int64]
MOST_STATES = 2**31
STEALING_PAYS_S = 0.01
"""In a turn that is expected to be over sooner, nobody steals: to ask for clients and to be told that there are none is
two round trips more, of a millisecond each on busy cores."""

TOLD = 3
"""Refused clients that a run's last line names."""


class Waiting(NamedTuple):
    """For executors, before a turn."""

    needed: int
    until_s: float | None
    """By the clock of `Tick`; None: without an end."""
    goes_on: bool = False
    """Whether the turn begins without the others then; else the run ends."""


class CoordinatorStatistics(msgspec.Struct, frozen=True):
    phase: Literal["joining", "running", "done"]
    round: int
    alive: int
    stale: int


class FederatedCoordinator:
    """The machine. It keeps which is each client's state: a number, 4 bytes a client, part of what a commit saves.

    Whoever trains a client tells the state's number, and is told it when the client is to go on: what the numbers mean
    is for those who keep the states.
    """

    def __init__(
        self,
        executors: Iterable[str],
        rules: RoundRules,
        sizes: Integers,
        cohort: Callable[[int], Integers],
        pace: Pace,
        *,
        states: NDArray[np.int32] | None = None,
        late: Callable[[int], Mapping[int, int]] = lambda round_: {},
    ) -> None:
        """`sizes` (population,) in samples; `cohort` gives the clients of a round, and `late` by how many rounds they
        are late in a simulation; `states` (population,) is None for algorithms that keep nothing."""
        self.executors = tuple(executors)
        self.durable_round = rules.first_round - 1
        """Set by the driver when a round has reached the disk."""
        self.rules = rules
        self._dealer = Dealer(self.executors, rules, sizes, pace, states)
        self._cohort_of = cohort
        self._late_of = late
        self._alive: set[str] = set()
        self._phase: Literal["joining", "running", "done"] = "joining"
        self._next = Turn(rules.first_round)
        """To be opened when enough are here."""
        self._since_s: float | None = None
        """When waiting for executors began."""
        self._cohort: Integers = np.empty(0, dtype=np.int64)
        self._asked = self._cohort
        """The clients of the open round's first pass; later ones are of those whose updates were in."""
        self._passed: list[OpenTurn] = []
        """The open round's passes that are over."""
        self._open: OpenTurn | None = None
        self._late: dict[str, tuple[Turn, Task]] = {}
        """Sites that go on for a turn that is closed, while no turn is open."""
        self._behind: dict[str, Turn] = {}
        """Executors that were told to drop a turn, and have not said since that they are done with it."""
        self._now_s = 0.0
        self._stale = 0

    def statistics(self) -> CoordinatorStatistics:
        return CoordinatorStatistics(self._phase, self._next.round, len(self._alive), self._stale)

    @property
    def behind(self) -> tuple[int, frozenset[str]]:
        """The open round, and who trains in it while others have nothing left to do."""
        if self._open is None:
            return self._next.round, frozenset()
        busy = frozenset(name for name, held in self._open.held.items() if held)
        return self._open.turn.round, busy if busy < self._alive else frozenset()

    @property
    def waiting(self) -> Waiting | None:
        """What the turn that is due waits for; None where one is open, or executors are not to come and go."""
        gathering, here = self.rules.gathering, len(self._alive)
        if gathering is None or self._phase != "joining":
            return None
        if self._next == Turn(0):
            return Waiting(gathering.start, None)
        since_s = self._now_s if self._since_s is None else self._since_s
        if here < self.rules.minimum:
            return Waiting(self.rules.minimum, since_s + self.rules.deadline_s)
        return Waiting(len(self.executors), since_s + gathering.wait_s, goes_on=True)

    @property
    def states(self) -> NDArray[np.int32] | None:
        """(population,) which is each client's state."""
        return self._dealer.states

    @property
    def here(self) -> Integers:
        """Clients of executors that are here, have one of their own and are not late with it, ascending."""
        pinned = self._dealer.pinned
        free = [name for name in self._alive if name in pinned and name not in self._late]
        return np.array(sorted(pinned[name] for name in free), dtype=np.int64)

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
                return self._gather() if self._phase == "joining" else self._look()
            case Interrupted():
                return self._end("interrupted")
            case Summed() if self._open is not None and self._is_late(event, self._open):
                return self._on_late(event, self._open)
            case Drained() | Returned() | Summed():
                if self._open is None or event.turn != self._open.turn or event.executor not in self._alive:
                    self._stale += 1
                    self._catches_up(event)
                    return [Ignore(event.executor, event.turn)] if isinstance(event, Summed) else []
                if not isinstance(event, Returned):  # which is answered while a client of an earlier turn is trained
                    self._behind.pop(event.executor, None)
                return self._in_turn(event, self._open)

    def _catches_up(self, event: Drained | Returned | Summed) -> None:
        """It is done with an earlier turn. What it said of one before that says nothing of what it does now."""
        if isinstance(event, Returned):
            return
        if self._behind.get(event.executor) == event.turn:
            del self._behind[event.executor]
        if event.executor in self._late and self._late[event.executor][0] == event.turn:
            del self._late[event.executor]

    def look_ahead(self) -> None:
        """Plan the next round while this one trains: its cohort is known, and times that are a round older do.

        For a driver that has nothing else to do; without it, a round is planned when it is opened.
        """
        following = self._next.round + 1
        if self._phase == "running" and not self._dealer.pinned and following < self.rules.rounds:
            self._dealer.plan_ahead(following, self._cohort_of(following), self._present())

    def _present(self) -> list[str]:
        return [name for name in self.executors if name in self._alive]

    # Before a turn

    def _join(self, event: Joined) -> list[CoordinatorInstruction]:
        self._alive.add(event.executor)
        if event.client is not None:
            self._dealer.pinned[event.executor] = event.client
            if event.samples is not None:
                self._dealer.sizes[event.client] = event.samples
        return self._gather() if self._phase == "joining" else []

    def _gather(self) -> list[CoordinatorInstruction]:
        """Open the turn that is due if enough are here; give up when they have not come by the deadline."""
        gathering, here = self.rules.gathering, len(self._alive)
        if self._since_s is None:
            self._since_s = self._now_s
        if here < len(self.executors):
            if gathering is None:
                return []
            if self._next == Turn(0):
                if here < gathering.start:
                    return []
            elif here < self.rules.minimum:
                return self._give_up(here) if self._now_s - self._since_s >= self.rules.deadline_s else []
            elif self._now_s - self._since_s < gathering.wait_s:
                return []
        self._phase, self._since_s = "running", None
        return self._open_turn(self._next)

    def _give_up(self, here: int) -> list[CoordinatorInstruction]:
        waited = f"{here} executors were here for {self.rules.deadline_s:g} s, expected {self.rules.minimum}"
        return self._end("lost", f"round {self._next.round + 1}: {waited}")

    def _open_turn(self, turn: Turn) -> list[CoordinatorInstruction]:
        self._next = turn
        if turn.round >= self.rules.rounds:
            return self._end("done")
        if self.rules.gathering is not None and len(self._alive) < self.rules.minimum:
            self._phase = "joining"
            return self._gather()
        out = self._drop_stale(turn)
        if not turn.number and (not turn.attempt or self.rules.gathering is not None):
            ahead = self._dealer.cohort_ahead(turn.round)
            self._cohort = self._cohort_of(turn.round) if ahead is None else ahead
        if not turn.number:
            self._asked, self._passed = self._cohort, []
            self._dealer.late = self._late_of(turn.round)
        alive = [name for name in self._present() if name not in self._late]
        deal = self._dealer.deal(turn.round, self._cohort, alive)
        clients = sum(map(len, deal.tasks.values()))
        line = self._dealer.line
        expected = clients + len(self._late)
        opened = OpenTurn(turn=turn, opened_s=self._now_s, needed=min(self.rules.needed, expected), line=line)
        opened.late, self._late = self._late, {}
        if deal.schedule is not None:
            opened.predicted_s, opened.bound_s = deal.schedule.makespan_s, deal.schedule.lower_bound_s
        self._open = opened
        asked = self._cohort
        if opened.late:
            asked = np.union1d(asked, [task.client for _, task in opened.late.values()]).astype(np.int64)
        opening = Opening(
            turn=turn, clients=len(asked), samples=self._dealer.samples(asked), durable_round=self.durable_round
        )
        brief = opened.predicted_s is not None and opened.predicted_s < STEALING_PAYS_S
        holds = self._steals and len(alive) > 1 and not brief
        for name in alive:
            mine = deal.tasks.get(name, ())
            if self.rules.single:
                opened.spare += mine[1:]
                mine = mine[:1]
            if not mine and not holds:
                continue  # nothing to train, nothing to say
            opened.give(name, mine)
            out.append(Open(name, TurnOpened(opening=opening, tasks=mine, holds=holds, brief=brief)))
        opened.spare.sort(key=lambda t: -t.samples)
        return out if expected else [*out, *self._close_turn("all")]

    def _drop_stale(self, turn: Turn) -> list[CoordinatorInstruction]:
        """Sites that are too late by now are asked for something newer."""
        gone = {n: t for n, (t, _) in self._late.items() if turn.round - t.round > self.rules.staleness}
        for name in gone:
            del self._late[name]
        return [self._drop(name, before) for name, before in gone.items()]

    def _drop(self, executor: str, turn: Turn, kept: tuple[int, ...] = (), *, again: bool = False) -> Tell:
        self._behind[executor] = turn
        return Tell(executor, Dropped(turn=turn, kept=kept, again=again))

    @property
    def _steals(self) -> bool:
        """Not where each has the data of one client, nor where every result is sent back by itself."""
        return self.rules.steals and not self._dealer.pinned and not self.rules.single

    # While it is open

    def _in_turn(self, event: Drained | Returned | Summed, opened: OpenTurn) -> list[CoordinatorInstruction]:
        match event:
            case Drained(executor=executor):
                opened.idle[executor] = None
                return [*feed_idle(opened, self._dealer, holds=self._steals)]
            case Returned(executor=executor, tasks=tasks):
                return self._on_returned(executor, tasks, opened)
            case Summed():
                return self._on_summed(event, opened)

    def _on_returned(self, victim: str, tasks: tuple[Task, ...], opened: OpenTurn) -> list[CoordinatorInstruction]:
        thief = opened.recalls.pop(victim, None)
        if not opened.take(victim, tasks):
            return self._expel(victim, "gave back clients that it was not given")
        return [*pass_on(tasks, thief, opened, self._dealer, holds=self._steals)]

    def _on_summed(self, event: Summed, opened: OpenTurn) -> list[CoordinatorInstruction]:
        held = opened.held.get(event.executor, {})
        if (fault := _fault(event, held)) is not None:
            return [Ignore(event.executor, event.turn), *self._expel(event.executor, fault)]
        opened.report(event.executor, event.timed, event.refused)
        out: list[CoordinatorInstruction] = [Merge(event.executor, event.turn), *self._tell_refusals(event)]
        if self.rules.single and opened.spare:
            out.append(grant(event.executor, (opened.spare.pop(0),), opened, holds=False))
        return [*out, *self._look()]

    def _is_late(self, event: Summed, opened: OpenTurn) -> bool:
        return event.executor in opened.late and opened.late[event.executor][0] == event.turn

    def _on_late(self, event: Summed, opened: OpenTurn) -> list[CoordinatorInstruction]:
        """It counts in this turn; the site is asked again in the next one."""
        before, task = opened.late.pop(event.executor)
        if (fault := _fault(event, {task.client: task})) is not None:
            return [Ignore(event.executor, event.turn), *self._expel(event.executor, fault)]
        opened.report(event.executor, event.timed, event.refused)
        opened.stale += [(t.client, opened.turn.round - before.round) for t in event.timed]
        return [Merge(event.executor, event.turn), *self._tell_refusals(event), *self._look()]

    def _tell_refusals(self, event: Summed) -> list[CoordinatorInstruction]:
        """Sites do not know of them: it is the coordinator that looks at what they send."""
        if self.rules.gathering is None:
            return []
        return [Tell(event.executor, Refused(turn=event.turn, reason=refusal.reason)) for refusal in event.refused]

    def _look(self) -> list[CoordinatorInstruction]:
        """Whether the turn is over."""
        if (opened := self._open) is None:
            return []
        behind = sum(len(opened.held.get(name, ())) for name in self._behind)
        if self.rules.quorum == 1:  # else they may be among those that make a quorum
            behind += len(opened.late)
        open_s = self._now_s - opened.opened_s
        why = self.rules.why_over(opened.outstanding, opened.done, opened.needed, open_s, behind)
        return [] if why is None else self._close_turn(why)

    # Its end

    def _close_turn(self, why: Why) -> list[CoordinatorInstruction]:
        opened, self._open = self._open, None
        assert opened is not None
        turn = opened.turn
        out: list[CoordinatorInstruction] = []
        there = [name for name in opened.held if name in self._alive]
        if opened.done < self.rules.minimum:
            out += [self._drop(name, turn, again=True) for name in there]
            out += [self._drop(name, before) for name, (before, _) in opened.late.items()]
            # Of a simulation's clients that were all trained, another attempt makes the same updates.
            if turn.attempt + 1 >= self.rules.attempts or (why == "all" and self.rules.gathering is None):
                what = f"round {turn.round + 1}: {opened.done} clients were in, expected at least {self.rules.minimum}"
                each = f"{self.rules.deadline_s:g} s" if why == "deadline" else ""
                tries = f"{turn.attempt + 1} attempts" if turn.attempt else ""
                after = f", after {' of '.join(filter(None, (tries, each)))}" if tries or each else ""
                reason = "; ".join([what + after, *opened.reasons, *_told(opened.refused)])
                return [*out, *self._end("diverged" if _diverged(opened, why) else "lost", reason)]
            return [*out, *self._try_again(Turn(turn.round, turn.attempt + 1, turn.number))]
        if self.rules.staleness and self.rules.gathering is not None:
            tasks = {name: next(iter(opened.held[name].values())) for name in there if opened.held[name]}
            self._late = opened.late | {name: (turn, task) for name, task in tasks.items()}
            there = []
        for name in there:
            if opened.held[name]:  # what it may send yet comes too late
                kept = tuple(t.client for t in opened.timed.get(name, ()))
                out.append(self._drop(name, turn, kept))
        out.append(Absorb(turn))
        lines = {} if opened.predicted_s is None else {name: opened.line(name) for name in opened.held}
        last = turn.number + 1 == self.rules.passes
        for name, timed in opened.timed.items():  # from here on other lines are believed
            if last:  # a client takes another time in each pass: the last one's is what is predicted and written down
                self._dealer.pace.record(turn.round, self._dealer.number(name), timed)
            self._dealer.keep(timed)
        trained = {t.client for timed in opened.timed.values() for t in timed}
        if not last:
            self._passed.append(opened)
            self._cohort = np.array(sorted(trained), dtype=np.int64)
            return [*out, *self._open_turn(Turn(turn.round, turn.attempt, turn.number + 1))]
        return [*out, Commit(self._record(opened, trained, lines, why)), *self._open_turn(Turn(turn.round + 1))]

    def _try_again(self, turn: Turn) -> list[CoordinatorInstruction]:
        """Those that are away are waited for first: it may be that only sites are back whose updates are refused."""
        if self.rules.gathering is None:
            return self._open_turn(turn)
        self._next, self._phase = turn, "joining"
        return self._gather()

    def _record(self, opened: OpenTurn, trained: set[int], lines: Mapping[str, Line], why: Why) -> Record:
        refusals = [r for one in (*self._passed, opened) for r in one.refused]
        refused = {r.client for r in refusals}
        earlier_s: dict[str, float] = {}
        for name, timed in ((name, timed) for one in self._passed for name, timed in one.timed.items()):
            earlier_s[name] = earlier_s.get(name, 0.0) + sum(t.seconds for t in timed)
        return Record(
            round=opened.turn.round, attempt=opened.turn.attempt,
            trained={name: tuple(timed) for name, timed in opened.timed.items() if timed},
            earlier_s=earlier_s, refused=tuple(refusals),
            missing=tuple(c for c in self._asked.tolist() if c not in trained and c not in refused),
            predicted_s=opened.predicted_s, bound_s=opened.bound_s,
            lines=lines, stolen=opened.stolen, closed_by=why,
            stale=(*opened.stale, *((c, late) for c, late in self._dealer.late.items() if late and c in trained)),
        )  # fmt: skip

    # Losses

    def _expel(self, executor: str, reason: str) -> list[CoordinatorInstruction]:
        """Of an executor that sent what it cannot have."""
        return [Dismiss(executor, reason), *self._lose(executor, reason)]

    def _lose(self, executor: str, reason: str) -> list[CoordinatorInstruction]:
        joining, returns = self._phase == "joining", self.rules.gathering is not None
        if executor not in self._alive and (returns or not joining):
            return []
        self._alive.discard(executor)
        self._behind.pop(executor, None)
        for late in (self._late, {} if self._open is None else self._open.late):
            late.pop(executor, None)
        if not returns and (not self._alive or joining):
            return self._end("lost", f"executor {executor!r} was lost: {reason}")
        opened = self._open
        if opened is None:
            return []
        opened.reasons.append(f"executor {executor!r}: {reason}")
        homeless = forget_executor(executor, opened)
        if self._dealer.pinned or not homeless:
            return [*feed_idle(opened, self._dealer, holds=self._steals), *self._look()]
        names = [name for name in self._present() if name in opened.held]
        if not names:  # nobody who is left has the turn's broadcast
            self._open, turn = None, opened.turn
            return self._open_turn(Turn(turn.round, turn.attempt + 1, turn.number))
        return [*rehouse(homeless, names, opened, self._dealer, holds=self._steals)]

    def _end(self, outcome: Outcome, reason: str = "") -> list[CoordinatorInstruction]:
        self._phase, self._open = "done", None
        return [Halt(), Finish(outcome, reason)]


def _diverged(opened: OpenTurn, why: Why) -> bool:
    """Whether every client of the turn was trained, and none to finite numbers."""
    everyone = why == "all" and not opened.done and not opened.reasons
    return everyone and bool(opened.refused) and all(refusal.diverged for refusal in opened.refused)


def _told(refused: Sequence[Refusal]) -> list[str]:
    """Of the refusals the first few, each with its client."""
    few = [f"client {r.client}: {r.reason.removeprefix(f'client {r.client}: ')}" for r in refused[:TOLD]]
    return [*few, f"and {len(refused) - TOLD} clients more"] if len(refused) > TOLD else few


def _fault(event: Summed, held: Mapping[int, Task]) -> str | None:
    """What is wrong with an executor's report of the clients that it was given."""
    reported = [t.client for t in event.timed] + [r.client for r in event.refused]
    if not set(reported) <= held.keys():
        return "reported clients that it was not given"
    if len(set(reported)) < len(reported):
        return "reported a client twice"
    if any(not 0 <= t.seconds < math.inf for t in event.timed):
        return "reported a time that is none"
    if any(not NONE <= t.state < MOST_STATES for t in event.timed):
        return "reported a state that is none"
    return None
