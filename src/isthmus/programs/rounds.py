"""Federated rounds: which clients, on which executor, and when a round is over.

    joining ──enough here──► phase open ──all in, quorum, or deadline──► update ──last pass──► commit ──► next round
       ▲                          │                 │                        └──► next pass, same cohort
       └──too few here────────────┴──too few in──► dropped, tried again

The sums of a lost executor are lost: its clients go to the other executors. An executor that runs out of clients steals
clients that another has not begun. Sums are exact and random streams belong to clients, so the bits do not depend on
which executor trains which client. Each site has one client, which no other site takes. A site that reconnects is used
again. Devices of a fleet come and go too: each trains any client, and a run goes on with one.
Masked sums are unmasked before the update (`masked.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.programs.merging import Finish, Outcome, Why
from isthmus.programs.open_phase import OpenPhase, RoundRecord, fault_of, has_diverged, record_of, refusal_texts
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorOrder,
    ExecutorReport,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    PhaseSetup,
    SumsSent,
    TasksReturned,
    UpdateRefused,
)
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ClientScheduler, ThroughputModel
from isthmus.protocol.secure_messages import SecureReport
from isthmus.session.program import JOINING, OVER, Policy, report
from isthmus.session.session import STARTING, Calls, Deadlines, Loss, Observation, Session, Waits

Integers = NDArray[np.int64]


class RoundPort(Protocol):
    """Rounds ask this of their host."""

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        """Send this to one executor. With `PhaseOpened` comes the broadcast."""

    def merge(self, executor: str, phase: PhaseId) -> None:
        """Take in the sums that the executor has just sent."""

    def ignore(self, executor: str, phase: PhaseId) -> None:
        """The sums that the executor has just sent came too late."""

    def dismiss(self, executor: str, reason: str) -> None:
        """Hang up on an executor that sent what it cannot have."""

    def update_server(self, phase: PhaseId, opening: PhaseSetup | None = None) -> None:
        """Every sum of the pass is in: the server's update. `opening` is the setup of a pass without clients, which no
        executor opens."""

    def commit(self, record: RoundRecord) -> None:
        """The round is part of the run."""

    def finished(self, finish: Finish) -> None:
        """Halt every executor. Nothing follows."""

    def call(self, device: str) -> None:
        """Have a device of the fleet start a process, which joins as an executor."""

    def note(self, text: str) -> None:
        """Tell people."""


class Waiting(NamedTuple):
    """For executors, before a phase."""

    needed: int
    until_s: float | None  # the time, by the host's clock, at which the wait ends; None: it has no end
    goes_on: bool = False  # whether the phase begins without the others then; else the run ends


class Rounds(Policy[RoundPort], Session):
    """Its host sets `port`, and says `clock` before what happened then.

    It keeps which is each client's state: a number, 4 bytes a client, part of what a commit saves. An executor that
    trains a client reports the state's number, and receives it when the client is trained again. Only the executors,
    which keep the states, know what a number means.
    """

    def __init__(
        self,
        executors: Iterable[str],
        rules: RoundRules,
        sizes: Integers,
        cohort: Callable[[int], Integers],
        throughput: ThroughputModel,
        *,
        clients: Mapping[str, int] | None = None,
        states: NDArray[np.int32] | None = None,
        late: Callable[[int], Mapping[int, int]] = lambda round_: {},
    ) -> None:
        """`sizes` (population,) in samples; `cohort` gives the clients of a round, and `late` by how many rounds they
        are late in a simulation; `clients` are the only clients of executors that have one of their own; `states`
        (population,) is None for algorithms that keep nothing."""
        Policy.__init__(self, JOINING)
        # Executors do not accuse each other.
        Session.__init__(self, lambda _: None, timeout_s=rules.timeout_s, grace_s=0.0)
        self.executors = tuple(executors)
        self.durable_round = rules.first_round - 1  # set by the driver when a round has reached the disk
        self.rules = rules
        self.clients = clients or {}
        self.finish: Finish | None = None  # how the run ended
        self.notes_waits = True  # whether a person watches, and the host looks often
        self._returns = rules.gathering is not None
        """Whether a lost executor may come back: one's failure does not end the run."""
        self._has_sites = self._returns and bool(self.clients)  # each has a client of its own
        self._calls_devices = self._returns and not self._has_sites
        self._calls = Calls()
        self._scheduler = ClientScheduler(self.executors, rules, sizes, throughput, states, self.clients)
        self._cohort_of = cohort
        self._late_of = late
        self._alive: set[str] = set()  # executors that have joined and are not lost
        self._next = PhaseId(rules.first_round)  # to be opened when enough are here
        self._since_s: float | None = None  # when waiting for executors began
        self._cohort: Integers = np.empty(0, dtype=np.int64)
        self._asked = self._cohort
        """The clients of the open round's first pass; later ones are of those whose updates were in."""
        self._passed: list[OpenPhase] = []  # the open round's passes that are over
        self._open: OpenPhase | None = None
        self._newest: PhaseId | None = None  # the phase that was opened last
        self._late: dict[str, tuple[PhaseId, ClientTask]] = {}
        """Sites that still train for a closed phase, while no phase is open."""
        self._behind: dict[str, PhaseId] = {}
        """Executors that were asked to drop a phase, and have not said since that they are done with it."""
        self._missed: set[str] = set()  # sites whose last round ended without them
        self._began_s: float | None = None  # when the host looked first
        self._missing = set(self.executors)  # executors that were never connected
        self._gone: dict[str, str] = {}  # why executors were lost that are not back
        self._joining = Waits(self._note)
        self._lags = Deadlines(rules.timeout_s, 0.0, self._note)

    @property
    def expected(self) -> Collection[str]:
        return () if self._has_sites else self._missing

    @property
    def concerned(self) -> Collection[str]:
        return self.executors

    @property
    def behind(self) -> tuple[int, frozenset[str]]:
        """The open round, and who trains in it while others have nothing left to do."""
        if self._open is None:
            return self._next.round, frozenset()
        busy = frozenset(name for name, held in self._open.held.items() if held)
        return self._open.phase.round, busy if busy < self._alive else frozenset()

    @property
    def _fewest(self) -> int:
        """Executors without which no phase begins, of those that come and go."""
        return self.rules.minimum if self._has_sites else 1

    @property
    def waiting(self) -> Waiting | None:
        """The executors that the next phase waits for; None where a phase is open, or executors are not to come and
        go."""
        gathering, here = self.rules.gathering, len(self._alive)
        if gathering is None or self.phase != JOINING:
            return None
        if self._next == PhaseId(0):
            return Waiting(max(gathering.start, self._fewest), None)
        since_s = self.now_s if self._since_s is None else self._since_s
        if here < self._fewest:
            return Waiting(self._fewest, since_s + self.rules.deadline_s if self._has_sites else None)
        return Waiting(len(self.executors), since_s + gathering.wait_s, goes_on=True)

    @property
    def due_s(self) -> float | None:
        times_s = [super().due_s]
        if self._open is not None and self.phase == "running":
            times_s.append(self._open.opened_s + self._open.deadline_s)
        elif (waiting := self.waiting) is not None:
            times_s.append(waiting.until_s)
        if self.expected and self._began_s is not None:
            limits_s = (self._began_s + self.rules.timeout_s, self._began_s + STARTING * self.rules.timeout_s)
            times_s.append(next((time_s for time_s in limits_s if time_s > self.now_s), None))
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def rounds_late(self, executor: str, phase: PhaseId) -> int | None:
        """Return how many rounds an update of this phase is late, if it comes now: 0 in the open phase, None if it does
        not count."""
        opened = self._open
        if opened is None or phase == opened.phase:
            return None if opened is None else 0
        late = opened.late.get(executor)
        return None if late is None or late[0] != phase else opened.phase.round - phase.round

    @property
    def states(self) -> NDArray[np.int32] | None:
        """(population,) which is each client's state."""
        return self._scheduler.states

    @property
    def here(self) -> Integers:
        """Clients of executors that are here, have one of their own and are not late with it, ascending."""
        pinned = self._scheduler.pinned
        free = [name for name in self._alive if name in pinned and name not in self._late]
        return np.array(sorted(pinned[name] for name in free), dtype=np.int64)

    # What the host says

    def joined(self, executor: str) -> None:
        """An executor's process, or a site, is connected. It joins by a report of its own."""
        if self.over:
            return
        self._missing.discard(executor)
        self.connected.add(executor)
        if self._gone.pop(executor, None) is not None:
            self._note(f"{self._who} {executor} is back")

    def heard(self, device: str, body: Any) -> None:
        """Take an `ExecutorReport`, or a `SecureReport` where sums are masked."""
        if self.over:
            return
        if isinstance(body, ExecutorJoined) or self._was_opened(body.phase):
            self._reported(device, body)
            return
        if isinstance(body, SumsSent):
            self.port.ignore(device, body.phase)
        self.refused(device, f"sent {type(body).__name__} of {body.phase}, which was not opened")

    def _reported(self, executor: str, body: ExecutorReport | SecureReport) -> None:
        if not isinstance(body, SecureReport):  # nothing is masked
            super().heard(executor, body)

    def refused(self, executor: str, reason: str) -> None:
        """It sent values that cannot be believed."""
        if self.is_here(executor) and not self.over:
            self.port.dismiss(executor, reason)
            self.disbelieve(executor, reason)

    def _was_opened(self, phase: PhaseId) -> bool:
        rules = self.rules
        tried = phase.attempt < rules.attempts or not self._has_sites  # where executors stay lost, more are made
        begun = self._newest is not None and phase <= self._newest
        return begun and rules.first_round <= phase.round and phase.number < rules.passes and tried

    def is_late(self, device: str, body: ExecutorReport) -> bool:
        if isinstance(body, ExecutorJoined):
            return False
        late = self.rounds_late(device, body.phase)
        return late is None or (late > 0 and not isinstance(body, SumsSent)) or device not in self._alive

    def dropped(self, device: str, body: PhaseReport) -> None:
        self._catches_up(device, body)
        if isinstance(body, SumsSent):
            if self._open is not None and body.phase == self._open.phase:
                self._open.lose(device)
            self.port.ignore(device, body.phase)

    def missed(self) -> Iterable[tuple[str, str]]:
        if self._began_s is None:
            self._began_s = self.now_s
        return super().missed()

    def looked(self, seen: Observation) -> None:
        super().looked(seen)
        if self.over:
            return
        if self._calls_devices:
            self._look_at_devices(seen)
        if self.notes_waits:
            self._note_waits()
        self._tick()

    def _look_at_devices(self, seen: Observation) -> None:
        for device in sorted(seen.leaving & self.connected):
            self.port.dismiss(device, "leaves")
            self.disbelieve(device, "it was asked to leave")
        for device in self._calls.due(seen.offers - self.connected - self._missing, self.now_s):
            if device not in self.executors:
                self.executors = (*self.executors, device)
                self._scheduler.add(device)
            self._missing.add(device)
            self._note(f"{device} is here, and is called to train")
            self.port.call(device)

    def _tick(self) -> None:
        """Time alone may open or close a phase."""
        if self.phase == JOINING:
            self._gather()
        else:
            self._look()

    def stop(self) -> None:
        """The user wants to stop: the open round is dropped."""
        if not self.over:
            self._end("interrupted")

    def under_way(self) -> None:
        """The executors have their tasks: there is time to plan the next round. Its cohort is known, and times that are
        a round older do. Without this call, a round is planned when it is opened."""
        if self.over:
            return
        following = self._next.round + 1
        planned = self._scheduler.pinned or self._scheduler.cohort_ahead(following) is not None
        if self.phase == "running" and not (
            planned or following >= self.rules.rounds or self._is_empty(PhaseId(following))
        ):
            self._scheduler.plan(following, self._cohort_of(following), self._present())

    def _catches_up(self, executor: str, report: PhaseReport) -> None:
        """The executor is done with an earlier phase. Its messages of still earlier phases do not change that."""
        if isinstance(report, TasksReturned):
            return
        if self._behind.get(executor) == report.phase:
            del self._behind[executor]
        if executor in self._late and self._late[executor][0] == report.phase:
            del self._late[executor]

    def _present(self) -> list[str]:
        return [name for name in self.executors if name in self._alive]

    def _free(self) -> list[str]:
        return [name for name in self._present() if name not in self._late]

    # Before a phase

    @report(ExecutorJoined, JOINING, "running", "unmasking")
    def _join(self, executor: str, joined: ExecutorJoined) -> None:
        self._alive.add(executor)
        if joined.samples is not None:
            self._scheduler.sizes[self._scheduler.pinned[executor]] = joined.samples
        if self.phase == JOINING:
            self._gather()

    def _gather(self) -> None:
        """Open the phase that is due if enough are here; give up when they have not come by the deadline."""
        gathering, here = self.rules.gathering, len(self._alive)
        if self._since_s is None:
            self._since_s = self.now_s
        first = self._next == PhaseId(0)
        fewest = 0 if gathering is None else max(gathering.start, self._fewest) if first else self._fewest
        if here < max(fewest, len(self.executors)):
            if gathering is None:
                return
            if first or self._calls_devices:
                if here < fewest:
                    return
            elif here < fewest:
                if self.now_s - self._since_s >= self.rules.deadline_s:
                    sites = "1 site was" if here == 1 else f"{here} sites were"
                    waited = f"{sites} here for {self.rules.deadline_s:g} s"
                    self._end("lost", f"round {self._next.round + 1}: {waited}, expected {fewest}")
                return
            if not first and self.now_s - self._since_s < gathering.wait_s:
                return
        self.phase, self._since_s = "running", None
        self._open_phase(self._next)

    def _open_phase(self, phase: PhaseId) -> None:
        while self._is_empty(phase):
            self._skip(phase)
            phase = PhaseId(phase.round + 1)
        self._open_drawn(phase)

    def _skip(self, phase: PhaseId) -> None:
        """A round that asks no client."""
        for number in range(self.rules.passes):
            one = PhaseId(phase.round, phase.attempt, number)
            self.port.update_server(one, PhaseSetup(phase=one, clients=0, samples=0))
        self.port.commit(RoundRecord(round=phase.round, attempt=phase.attempt, trained={}))

    def _is_empty(self, phase: PhaseId) -> bool:
        """Return whether every client was drawn by itself, and none was: nobody need be there."""
        begins = self.rules.poisson and not (phase.number or self._late) and phase.round < self.rules.rounds
        waits = self._returns and len(self._alive) < self._fewest
        return begins and not waits and not len(self._cohort_of(phase.round))

    def _open_drawn(self, phase: PhaseId) -> None:
        self._next = phase
        if phase.round >= self.rules.rounds:
            self._end("done")
            return
        if self._returns and len(self._alive) < self._fewest:
            self.phase = JOINING
            self._gather()
            return
        self._drop_stale(phase)
        if not phase.number and (not phase.attempt or self._has_sites):
            ahead = self._scheduler.cohort_ahead(phase.round)
            self._cohort = self._cohort_of(phase.round) if ahead is None else ahead
        if not phase.number:
            self._asked, self._passed = self._cohort, []
            self._scheduler.late = self._late_of(phase.round)
        self._begin_phase(phase, self._free())

    def _begin_phase(self, phase: PhaseId, alive: Sequence[str]) -> None:
        assignment = self._scheduler.assignment(phase.round, self._cohort, alive)
        expected = sum(map(len, assignment.tasks.values())) + len(self._late)
        needed = len(self._asked) if self.rules.poisson else self.rules.needed
        schedule = assignment.schedule
        opened = OpenPhase(
            phase=phase,
            opened_s=self.now_s,
            enough=min(self.rules.enough(needed), expected),
            least=self.rules.minimum,
            deadline_s=self.rules.deadline_s,
            scheduler=self._scheduler,
            notify=self._notify,
            steals=self._steals,
            predicted_s=None if schedule is None else schedule.makespan_s,
            bound_s=None if schedule is None else schedule.lower_bound_s,
        )
        self._open, opened.late, self._late = opened, self._late, {}
        late = [task.client for _, task in opened.late.values()]
        asked = np.union1d(self._cohort, late).astype(np.int64) if late else self._cohort
        opening = PhaseSetup(
            phase=phase, clients=len(asked), samples=self._scheduler.samples(asked), durable_round=self.durable_round
        )
        brief = opened.predicted_s is not None and opened.predicted_s < self.rules.stealing_pays_s
        holds = opened.steals and len(alive) > 1 and not brief
        for name in alive:
            mine = assignment.tasks.get(name, ())
            if self.rules.single:
                opened.unassigned += mine[1:]
                mine = mine[:1]
            if not mine and not holds:
                continue  # nothing to train, nothing to say
            self._on_opened(phase)
            opened.give(name, mine)
            self.port.notify(name, PhaseOpened(opening=opening, tasks=mine, holds=holds, brief=brief))
        opened.unassigned.sort(key=lambda t: -t.samples)
        self._invited(opened)
        if not expected:
            self._close_phase("all")

    def _on_opened(self, phase: PhaseId) -> None:
        before, self._newest = self._newest, phase
        if phase.attempt and (before is None or (before.round, before.attempt) != (phase.round, phase.attempt)):
            self._note(f"round {phase.round + 1} is tried again: attempt {phase.attempt + 1}")

    def _invited(self, opened: OpenPhase) -> None:
        """The phase's opening is sent."""

    def _notify(self, executor: str, order: ExecutorOrder) -> None:
        self.port.notify(executor, order)

    def _drop_stale(self, phase: PhaseId) -> None:
        """Sites that are too late by now are asked for something newer."""
        gone = {n: t for n, (t, _) in self._late.items() if phase.round - t.round > self.rules.staleness}
        for name in gone:
            del self._late[name]
        for name, before in gone.items():
            self._drop(name, before)

    def _drop(
        self, executor: str, phase: PhaseId, kept: tuple[int, ...] = (), *, again: bool = False, busy: bool = True
    ) -> None:
        if busy:
            self._behind[executor] = phase
        if self._has_sites and not again and executor not in self._missed:
            self._missed.add(executor)
            ended = f"round {phase.round + 1} ended without its update, which is ignored if it comes"
            self._note(f"site {executor}: {ended}; rounds do not wait for this site until it is in time again")
        self.port.notify(executor, PhaseDropped(phase=phase, kept=kept, again=again))

    @property
    def _steals(self) -> bool:
        """Not where each has the data of one client, nor where every result is sent back by itself."""
        return self.rules.steals and not self._scheduler.pinned and not self.rules.single

    # While it is open

    @report(ExecutorDrained, "running")
    def _on_drained(self, executor: str, drained: ExecutorDrained) -> None:
        opened = self._opened
        self._behind.pop(executor, None)
        opened.idle[executor] = None
        opened.assign_idle()

    @report(TasksReturned, "running")
    def _on_returned(self, victim: str, returned: TasksReturned) -> None:
        """It may be answered while a client of an earlier phase is trained."""
        if not self._opened.returned(victim, returned.tasks):
            self._expel(victim, "gave back clients that it was not given")

    @report(SumsSent, "running")
    def _on_summed(self, executor: str, sums: SumsSent) -> None:
        """A late update counts in this phase. The site gets a task again in the next phase."""
        opened = self._opened
        if late := sums.phase != opened.phase:
            before, task = opened.late.pop(executor)
            held = {task.client: task}
            rounds_late = opened.phase.round - before.round
        else:
            self._behind.pop(executor, None)
            held, rounds_late = opened.held.get(executor, {}), 0
        if (fault := fault_of(sums, held)) is not None:
            self.port.ignore(executor, sums.phase)
            self._expel(executor, fault)
            return
        opened.report(executor, sums.timed, sums.refused)
        if late:
            opened.stale += [(t.client, rounds_late) for t in sums.timed]
        if executor in self._missed:
            self._missed.remove(executor)
            self._note(f"site {executor} is in time again")
        self.port.merge(executor, sums.phase)
        if self._has_sites:  # they do not know of them: the coordinator looks at what they send
            for refusal in sums.refused:
                self.port.notify(executor, UpdateRefused(phase=sums.phase, reason=refusal.reason))
        if self.rules.single and opened.unassigned and not late:
            opened.grant(executor, (opened.unassigned.pop(0),))
        self._look()

    @property
    def _opened(self) -> OpenPhase:
        assert self._open is not None, "a report is late while no phase is open"
        return self._open

    def _look(self) -> None:
        """Close the phase where it is over."""
        if (opened := self._open) is None:
            return
        behind = sum(len(opened.held.get(name, ())) for name in self._behind)
        if self.rules.quorum == 1:  # else they may be among those that make a quorum
            behind += len(opened.late)
        if (why := opened.why_over(self.now_s, behind=behind)) is not None:
            self._answered(opened, why)

    def _answered(self, opened: OpenPhase, why: Why) -> None:
        """The phase is over."""
        self._close_phase(why)

    # Its end

    def _close_phase(self, why: Why) -> None:
        opened, self._open = self._opened, None
        phase = opened.phase
        there = [name for name in opened.held if name in self._alive]
        if opened.done < self.rules.minimum:
            self._drop_phase(opened, there, why)
            return
        if self.rules.staleness and self._has_sites:
            tasks = {name: next(iter(opened.held[name].values())) for name in there if opened.held[name]}
            self._late = opened.late | {name: (phase, task) for name, task in tasks.items()}
            there = []
        for name in there:
            if opened.held[name]:  # what it may send yet comes too late
                self._drop(name, phase, tuple(t.client for t in opened.timed.get(name, ())))
        self.port.update_server(phase)
        lines = {} if opened.predicted_s is None else {name: self._scheduler.line(name) for name in opened.held}
        last = phase.number + 1 == self.rules.passes
        for name, timed in opened.timed.items():  # from here on other lines are believed
            if last:  # a client takes another time in each pass: the last one's is what is predicted and written down
                self._scheduler.throughput.record(phase.round, self._scheduler.number(name), timed)
            self._scheduler.keep(timed)
        if not last:
            trained = {t.client for timed in opened.timed.values() for t in timed}
            self._passed.append(opened)
            self._cohort = np.array(sorted(trained), dtype=np.int64)
            self._open_phase(PhaseId(phase.round, phase.attempt, phase.number + 1))
            return
        late, asked = self._scheduler.late, self._asked.tolist()
        self.port.commit(record_of(opened, self._passed, asked, lines=lines, late=late, why=why))
        self._open_phase(PhaseId(phase.round + 1))

    def _drop_phase(self, opened: OpenPhase, there: Sequence[str], why: Why) -> None:
        """Too few are in: try again, or give up."""
        phase = opened.phase
        for name in there:
            self._drop(name, phase, again=True, busy=bool(opened.held[name]))
        for name, (before, _) in opened.late.items():
            self._drop(name, before)
        # Of a simulation's clients that were all trained, another attempt makes the same updates.
        if phase.attempt + 1 >= self.rules.attempts or (why == "all" and not self._has_sites):
            what = f"round {phase.round + 1}: {opened.done} clients were in, expected at least {self.rules.minimum}"
            each = f"{self.rules.deadline_s:g} s" if why == "deadline" else ""
            tries = f"{phase.attempt + 1} attempts" if phase.attempt else ""
            after = f", after {' of '.join(filter(None, (tries, each)))}" if tries or each else ""
            reason = "; ".join([what + after, *opened.reasons, *refusal_texts(opened.refused)])
            self._end("diverged" if has_diverged(opened, why) else "lost", reason)
            return
        again = PhaseId(phase.round, phase.attempt + 1, phase.number)
        if not self._returns:
            self._open_phase(again)
        else:  # those that are away are waited for: it may be that only sites are back whose updates are refused
            self._next, self.phase = again, JOINING
            self._gather()

    # Losses

    def lost(self, loss: Loss) -> None:
        executor, reason = loss.device, loss.reason
        self.connected.discard(executor)
        others = self._calls_devices and (self.connected or self._missing - {executor})
        if loss.cause == "job" and not (self._has_sites or others):
            self._end("failed", reason)
            return
        if self._calls_devices:
            self._missing.discard(executor)
            self._calls.failed(executor, self.now_s)
        self._gone[executor] = reason
        self._lose(executor, reason)
        if self.finish is None or reason not in self.finish.reason:
            self._note(f"{self._who} {executor} was lost: {reason}")

    def _expel(self, executor: str, reason: str) -> None:
        """Dismiss an executor that sent an invalid message."""
        self.connected.discard(executor)
        self._note(f"{self._who} {executor} {reason}: dismissed")
        self.port.dismiss(executor, reason)
        self._lose(executor, reason)

    def _lose(self, executor: str, reason: str) -> None:
        joining = self.phase == JOINING
        if self.over or (executor not in self._alive and (self._returns or not joining)):
            return
        self._alive.discard(executor)
        self._behind.pop(executor, None)
        for late in (self._late, {} if self._open is None else self._open.late):
            late.pop(executor, None)
        if not self._returns and (not self._alive or joining):
            self._end("lost", f"executor {executor!r} was lost: {reason}")
        elif self._open is not None:
            self._open.reasons.append(f"executor {executor!r}: {reason}")
            self._go_on_without(executor, self._open)

    def _go_on_without(self, executor: str, opened: OpenPhase) -> None:
        orphaned = opened.forget(executor)
        if self._scheduler.pinned or not orphaned:
            opened.assign_idle()
            self._look()
        elif names := [name for name in self._present() if name in opened.held]:
            opened.reassign(orphaned, names)
        else:  # nobody who is left has the phase's broadcast
            self._open, phase = None, opened.phase
            self._open_phase(PhaseId(phase.round, phase.attempt + 1, phase.number))

    def _end(self, outcome: Outcome, reason: str = "") -> None:
        self.phase, self._open = OVER, None
        self.finish = Finish(outcome, reason)
        self.port.finished(self.finish)

    # Lines for people

    @property
    def _who(self) -> str:
        return "site" if self._has_sites else "device" if self._returns else "executor"

    def _note(self, text: str) -> None:
        self.port.note(text)

    def _note_waits(self) -> None:
        joining = self.phase == JOINING
        missing = set(filterfalse(self.is_here, self.executors)) if joining else set[str]()
        if self._calls_devices:
            waiting = self.waiting
            missing = {f"at least {waiting.needed}"} if waiting is not None and not waiting.goes_on else set()
        what = "for sites that left" if self._has_sites and missing - self._missing else "to join"
        until = self._until(missing)
        if self._has_sites and self._all_left(missing):
            missing = {f"all {len(missing)}"}  # the line of each one that left has its reason
        self._joining.look(what, missing, self.now_s, until=until)
        self._lags.lag(*self.behind, self.now_s)

    def _all_left(self, missing: Collection[str]) -> bool:
        """Return whether several were here, and nobody is any more."""
        return 1 < len(missing) == len(self.executors) and self._missing.isdisjoint(missing)

    def _until(self, missing: Collection[str]) -> str:
        """Return which sites the run waits for, how the wait ends, and why sites left."""
        if (waiting := self.waiting) is None:
            return ""
        if self._calls_devices:
            return f" (executors of {len(self.connected)} devices have connected)"
        count = len(self.executors)
        here = f"{count - len(missing)} of {count} sites are here"
        end = f"the round begins with {waiting.needed}"
        if waiting.until_s is None and waiting.needed > 1:
            end = f"{end}; for fewer, set federated.deployment.start"
        elif waiting.until_s is not None:
            left = f"in {max(0.0, waiting.until_s - self.now_s):.0f} s"
            end = f"{left} the round begins without the others" if waiting.goes_on else f"{end}, {left} the run ends"
        if self._all_left(missing):
            return f" ({end})"
        gone = "; ".join(f"{name} left: {self._gone[name]}" for name in sorted(missing) if name in self._gone)
        return f" ({here}; {end}{'; ' if gone else ''}{gone})"
