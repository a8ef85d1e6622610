"""The federated coordinator: which clients, on which executor, and when a round is over. Events in, instructions out.

    joining ──enough here──► phase open ──all in, quorum, or deadline──► absorb ──last pass──► commit ──► next round
       ▲                          │                 │                         └──► next pass, same cohort
       └──too few here────────────┴──too few in──► dropped, tried again

The sums of a lost executor are lost: its clients go to the other executors. An executor that runs out of clients steals
clients that another has not begun. Sums are exact and random streams belong to clients, so the bits do not depend on
which executor trains which client. Each site has one client, which no other site takes. A site that reconnects is used
again. Masked sums are unmasked before `absorb` (`secure_coordinator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from isthmus.protocol.federated_events import (
    CommitRound,
    CoordinatorEvent,
    CoordinatorInstruction,
    DismissExecutor,
    ExecutorLost,
    FinishRounds,
    IgnoreSums,
    MergeSums,
    Notify,
    Outcome,
    PhaseUnderWay,
    PlanRound,
    RoundPlanned,
    RunInterrupted,
    Tick,
    Unmasked,
    UnmaskSums,
    UpdateServer,
)
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorDrained,
    ExecutorJoined,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    PhaseSetup,
    SumsSent,
    TasksReturned,
    UpdateRefused,
)
from isthmus.protocol.federated_phase import FederatedStatistics, OpenPhase
from isthmus.protocol.federated_reports import empty_round, fault_of, has_diverged, record_of, refusal_texts
from isthmus.protocol.federated_rules import RoundRules, Waiting, Why
from isthmus.protocol.federated_scheduler import ClientScheduler
from isthmus.protocol.federated_throughput import ThroughputModel
from isthmus.protocol.federated_transitions import COORDINATOR, CoordinatorPhase
from isthmus.protocol.machine import FromDevice, Machine
from isthmus.protocol.run_messages import Halt
from isthmus.protocol.work_stealing import assign_idle, assign_returned, forget_executor, grant_tasks, reassign

Integers = NDArray[np.int64]


class FederatedCoordinator(Machine[CoordinatorPhase, CoordinatorEvent, CoordinatorInstruction]):
    """The machine. It keeps which is each client's state: a number, 4 bytes a client, part of what a commit saves.

    An executor that trains a client reports the state's number, and receives it when the client is trained again. Only
    the executors, which keep the states, know what a number means.
    """

    transitions = COORDINATOR

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
        super().__init__()
        self.executors = tuple(executors)
        self.durable_round = rules.first_round - 1
        """Set by the driver when a round has reached the disk."""
        self.rules = rules
        self.clients = clients or {}
        self._scheduler = ClientScheduler(self.executors, rules, sizes, throughput, states, self.clients)
        self.place_states = self._scheduler.place_states
        self._cohort_of = cohort
        self._late_of = late
        self._alive: set[str] = set()
        self._next = PhaseId(rules.first_round)
        """To be opened when enough are here."""
        self._since_s: float | None = None
        """When waiting for executors began."""
        self._cohort: Integers = np.empty(0, dtype=np.int64)
        self._asked = self._cohort
        """The clients of the open round's first pass; later ones are of those whose updates were in."""
        self._passed: list[OpenPhase] = []
        """The open round's passes that are over."""
        self._open: OpenPhase | None = None
        self._late: dict[str, tuple[PhaseId, ClientTask]] = {}
        """Sites that still train for a closed phase, while no phase is open."""
        self._behind: dict[str, PhaseId] = {}
        """Executors that were asked to drop a phase, and have not said since that they are done with it."""
        self._why: Why = "all"
        self._now_s = 0.0

    def statistics(self) -> FederatedStatistics:
        return FederatedStatistics(self._phase, self._next.round, len(self._alive), self._stale)

    @property
    def behind(self) -> tuple[int, frozenset[str]]:
        """The open round, and who trains in it while others have nothing left to do."""
        if self._open is None:
            return self._next.round, frozenset()
        busy = frozenset(name for name, held in self._open.held.items() if held)
        return self._open.phase.round, busy if busy < self._alive else frozenset()

    @property
    def waiting(self) -> Waiting | None:
        """The executors that the next phase waits for; None where a phase is open, or executors are not to come and
        go."""
        gathering, here = self.rules.gathering, len(self._alive)
        if gathering is None or self._phase != "joining":
            return None
        if self._next == PhaseId(0):
            return Waiting(gathering.start, None)
        since_s = self._now_s if self._since_s is None else self._since_s
        if here < self.rules.minimum:
            return Waiting(self.rules.minimum, since_s + self.rules.deadline_s)
        return Waiting(len(self.executors), since_s + gathering.wait_s, goes_on=True)

    @property
    def due_s(self) -> float | None:
        """The time, by the clock of `Tick`, at which the next tick may decide something, if nothing else happens
        before."""
        if self._open is not None:
            return None if self._phase == "unmasking" else self._open.opened_s + self.rules.deadline_s
        return None if (waiting := self.waiting) is None else waiting.until_s

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

    def _is_stale(self, event: CoordinatorEvent) -> bool:
        if self._phase == "done" or type(event) is not FromDevice or isinstance(event.body, ExecutorJoined):
            return False
        if self._phase == "unmasking":
            return True  # what is in the sum cannot change any more
        executor, report = event.device, event.body
        late = self.rounds_late(executor, report.phase)
        return late is None or (late > 0 and not isinstance(report, SumsSent)) or executor not in self._alive

    def _answer_stale(self, event: CoordinatorEvent) -> list[CoordinatorInstruction]:
        assert isinstance(event, FromDevice) and not isinstance(event.body, ExecutorJoined), "nothing else is late"
        executor, report = event.device, event.body
        self._catches_up(executor, report)
        if self._open is not None and report.phase == self._open.phase and isinstance(report, SumsSent):
            self._open.lose(executor)
        return [IgnoreSums(executor, report.phase)] if isinstance(report, SumsSent) else []

    def _take(self, event: CoordinatorEvent) -> list[CoordinatorInstruction]:
        match event:
            case FromDevice(device=executor, body=report):
                if isinstance(report, ExecutorJoined):
                    return self._join(executor, report.samples)
                return self._on_report(executor, report)
            case ExecutorLost(executor=executor, reason=reason):
                return self._lose(executor, reason)
            case Tick(now_s=now_s):
                self._now_s = now_s
                return self._gather() if self._phase == "joining" else self._look()
            case RunInterrupted():
                return self._end("interrupted")
            case PhaseUnderWay():
                return self._look_ahead()
            case Unmasked(reason=reason):
                return self._on_unmasked(reason)
            case RoundPlanned(schedule=schedule):
                self._scheduler.take(schedule)
                if self._phase == "running":
                    return []
                self._phase = "running"
                return self._begin_phase(self._next)

    def _catches_up(self, executor: str, report: PhaseReport) -> None:
        """The executor is done with an earlier phase. Its messages of still earlier phases do not change that."""
        if isinstance(report, TasksReturned):
            return
        if self._behind.get(executor) == report.phase:
            del self._behind[executor]
        if executor in self._late and self._late[executor][0] == report.phase:
            del self._late[executor]

    def _look_ahead(self) -> list[CoordinatorInstruction]:
        """Plan the next round while this one trains: its cohort is known, and times that are a round older do."""
        following = self._next.round + 1
        planned = self._scheduler.pinned or self._scheduler.cohort_ahead(following) is not None
        if self._phase != "running" or planned or following >= self.rules.rounds or self._is_empty(PhaseId(following)):
            return []
        return [PlanRound(following, self._scheduler.ask(following, self._cohort_of(following), self._present()))]

    def _present(self) -> list[str]:
        return [name for name in self.executors if name in self._alive]

    def _free(self) -> list[str]:
        return [name for name in self._present() if name not in self._late]

    # Before a phase

    def _join(self, executor: str, samples: int | None) -> list[CoordinatorInstruction]:
        self._alive.add(executor)
        if samples is not None:
            self._scheduler.sizes[self._scheduler.pinned[executor]] = samples
        return self._gather() if self._phase == "joining" else []

    def _gather(self) -> list[CoordinatorInstruction]:
        """Open the phase that is due if enough are here; give up when they have not come by the deadline."""
        gathering, here = self.rules.gathering, len(self._alive)
        if self._since_s is None:
            self._since_s = self._now_s
        if here < len(self.executors):
            if gathering is None:
                return []
            if self._next == PhaseId(0):
                if here < gathering.start:
                    return []
            elif here < self.rules.minimum:
                return self._give_up(here) if self._now_s - self._since_s >= self.rules.deadline_s else []
            elif self._now_s - self._since_s < gathering.wait_s:
                return []
        self._phase, self._since_s = "running", None
        return self._open_phase(self._next)

    def _give_up(self, here: int) -> list[CoordinatorInstruction]:
        waited = f"{here} executors were here for {self.rules.deadline_s:g} s, expected {self.rules.minimum}"
        return self._end("lost", f"round {self._next.round + 1}: {waited}")

    def _open_phase(self, phase: PhaseId) -> list[CoordinatorInstruction]:
        out: list[CoordinatorInstruction] = []
        while self._is_empty(phase):
            out += empty_round(phase, self.rules.passes)
            phase = PhaseId(phase.round + 1)
        return [*out, *self._open_drawn(phase)]

    def _is_empty(self, phase: PhaseId) -> bool:
        """Whether every client was drawn by itself, and none was: nobody need be there."""
        begins = self.rules.poisson and not (phase.number or self._late) and phase.round < self.rules.rounds
        waits = self.rules.gathering is not None and len(self._alive) < self.rules.minimum
        return begins and not waits and not len(self._cohort_of(phase.round))

    def _open_drawn(self, phase: PhaseId) -> list[CoordinatorInstruction]:
        self._next = phase
        if phase.round >= self.rules.rounds:
            return self._end("done")
        if self.rules.gathering is not None and len(self._alive) < self.rules.minimum:
            self._phase = "joining"
            return self._gather()
        out = self._drop_stale(phase)
        if not phase.number and (not phase.attempt or self.rules.gathering is not None):
            ahead = self._scheduler.cohort_ahead(phase.round)
            self._cohort = self._cohort_of(phase.round) if ahead is None else ahead
        if not phase.number:
            self._asked, self._passed = self._cohort, []
            self._scheduler.late = self._late_of(phase.round)
        alive = self._free()
        if self._scheduler.is_planned(phase.round, self._cohort, alive):
            return [*out, *self._begin_phase(phase)]
        self._phase = "planning"
        return [*out, PlanRound(phase.round, self._scheduler.ask(phase.round, self._cohort, alive))]

    def _begin_phase(self, phase: PhaseId) -> list[CoordinatorInstruction]:
        out: list[CoordinatorInstruction] = []
        alive = self._free()
        assignment = self._scheduler.assignment(self._cohort, alive)
        expected = sum(map(len, assignment.tasks.values())) + len(self._late)
        needed = len(self._asked) if self.rules.poisson else self.rules.needed
        enough = min(self.rules.enough(needed), expected)
        opened = OpenPhase(phase=phase, opened_s=self._now_s, enough=enough, line=self._scheduler.line)
        self._open, opened.late, self._late = opened, self._late, {}
        if (schedule := assignment.schedule) is not None:
            opened.predicted_s, opened.bound_s = schedule.makespan_s, schedule.lower_bound_s
        late = [task.client for _, task in opened.late.values()]
        asked = np.union1d(self._cohort, late).astype(np.int64) if late else self._cohort
        opening = PhaseSetup(
            phase=phase, clients=len(asked), samples=self._scheduler.samples(asked), durable_round=self.durable_round
        )
        brief = opened.predicted_s is not None and opened.predicted_s < self.rules.stealing_pays_s
        holds = self._steals and len(alive) > 1 and not brief
        for name in alive:
            mine = assignment.tasks.get(name, ())
            if self.rules.single:
                opened.unassigned += mine[1:]
                mine = mine[:1]
            if not mine and not holds:
                continue  # nothing to train, nothing to say
            opened.give(name, mine)
            out.append(Notify(name, PhaseOpened(opening=opening, tasks=mine, holds=holds, brief=brief)))
        opened.unassigned.sort(key=lambda t: -t.samples)
        return out if expected else [*out, *self._close_phase("all")]

    def _drop_stale(self, phase: PhaseId) -> list[CoordinatorInstruction]:
        """Sites that are too late by now are asked for something newer."""
        gone = {n: t for n, (t, _) in self._late.items() if phase.round - t.round > self.rules.staleness}
        for name in gone:
            del self._late[name]
        return [self._drop(name, before) for name, before in gone.items()]

    def _drop(
        self, executor: str, phase: PhaseId, kept: tuple[int, ...] = (), *, again: bool = False, busy: bool = True
    ) -> Notify:
        if busy:
            self._behind[executor] = phase
        return Notify(executor, PhaseDropped(phase=phase, kept=kept, again=again))

    @property
    def _steals(self) -> bool:
        """Not where each has the data of one client, nor where every result is sent back by itself."""
        return self.rules.steals and not self._scheduler.pinned and not self.rules.single

    # While it is open

    def _on_report(self, executor: str, report: PhaseReport) -> list[CoordinatorInstruction]:
        opened = self._open
        assert opened is not None, "the table has no report while no phase is open"
        if isinstance(report, SumsSent) and report.phase != opened.phase:
            return self._on_late(executor, report, opened)
        if not isinstance(report, TasksReturned):  # answered while a client of an earlier phase is trained
            self._behind.pop(executor, None)
        match report:
            case ExecutorDrained():
                opened.idle[executor] = None
                return [*assign_idle(opened, self._scheduler, holds=self._steals)]
            case TasksReturned(tasks=tasks):
                return self._on_returned(executor, tasks, opened)
            case SumsSent():
                return self._on_summed(executor, report, opened)

    def _on_returned(
        self, victim: str, tasks: tuple[ClientTask, ...], opened: OpenPhase
    ) -> list[CoordinatorInstruction]:
        thief = opened.recalls.pop(victim, None)
        if thief is None or not opened.take(victim, tasks):
            return self._expel(victim, "gave back clients that it was not given")
        return [*assign_returned(tasks, thief, opened, self._scheduler, holds=self._steals)]

    def _on_summed(self, executor: str, sums: SumsSent, opened: OpenPhase) -> list[CoordinatorInstruction]:
        if (fault := fault_of(sums, opened.held.get(executor, {}))) is not None:
            return [IgnoreSums(executor, sums.phase), *self._expel(executor, fault)]
        opened.report(executor, sums.timed, sums.refused)
        out: list[CoordinatorInstruction] = [MergeSums(executor, sums.phase), *self._tell_refusals(executor, sums)]
        if self.rules.single and opened.unassigned:
            out.append(grant_tasks(executor, (opened.unassigned.pop(0),), opened, holds=False))
        return [*out, *self._look()]

    def _on_late(self, executor: str, sums: SumsSent, opened: OpenPhase) -> list[CoordinatorInstruction]:
        """A late update counts in this phase. The site gets a task again in the next phase."""
        before, task = opened.late.pop(executor)
        if (fault := fault_of(sums, {task.client: task})) is not None:
            return [IgnoreSums(executor, sums.phase), *self._expel(executor, fault)]
        opened.report(executor, sums.timed, sums.refused)
        opened.stale += [(t.client, opened.phase.round - before.round) for t in sums.timed]
        return [MergeSums(executor, sums.phase), *self._tell_refusals(executor, sums), *self._look()]

    def _tell_refusals(self, executor: str, sums: SumsSent) -> list[CoordinatorInstruction]:
        """Sites do not know of them: it is the coordinator that looks at what they send."""
        if self.rules.gathering is None:
            return []
        return [Notify(executor, UpdateRefused(phase=sums.phase, reason=refusal.reason)) for refusal in sums.refused]

    def _look(self) -> list[CoordinatorInstruction]:
        """Whether the phase is over."""
        if (opened := self._open) is None or self._phase == "unmasking":
            return []
        behind = sum(len(opened.held.get(name, ())) for name in self._behind)
        if self.rules.quorum == 1:  # else they may be among those that make a quorum
            behind += len(opened.late)
        open_s = self._now_s - opened.opened_s
        why = self.rules.why_over(opened.outstanding, opened.done, opened.enough, open_s, behind)
        if why is not None and self.rules.secure is not None and opened.done >= self.rules.minimum:
            self._phase, self._why = "unmasking", why
            return [UnmaskSums(opened.phase, frozenset(name for name, timed in opened.timed.items() if timed))]
        return [] if why is None else self._close_phase(why)

    # Its end

    def _on_unmasked(self, reason: str) -> list[CoordinatorInstruction]:
        """With a reason: the masks stay on, and no update of the phase is of use."""
        assert self._open is not None, "the sums of the open phase are unmasked"
        self._phase = "running"
        if reason:
            self._open.done, self._open.reasons = 0, [*self._open.reasons, reason]
        return self._close_phase(self._why)

    def _close_phase(self, why: Why) -> list[CoordinatorInstruction]:
        opened, self._open = self._open, None
        assert opened is not None
        phase = opened.phase
        out: list[CoordinatorInstruction] = []
        there = [name for name in opened.held if name in self._alive]
        if opened.done < self.rules.minimum:
            out += [self._drop(name, phase, again=True, busy=bool(opened.held[name])) for name in there]
            out += [self._drop(name, before) for name, (before, _) in opened.late.items()]
            # Of a simulation's clients that were all trained, another attempt makes the same updates.
            if phase.attempt + 1 >= self.rules.attempts or (why == "all" and self.rules.gathering is None):
                what = f"round {phase.round + 1}: {opened.done} clients were in, expected at least {self.rules.minimum}"
                each = f"{self.rules.deadline_s:g} s" if why == "deadline" else ""
                tries = f"{phase.attempt + 1} attempts" if phase.attempt else ""
                after = f", after {' of '.join(filter(None, (tries, each)))}" if tries or each else ""
                reason = "; ".join([what + after, *opened.reasons, *refusal_texts(opened.refused)])
                return [*out, *self._end("diverged" if has_diverged(opened, why) else "lost", reason)]
            return [*out, *self._try_again(PhaseId(phase.round, phase.attempt + 1, phase.number))]
        if self.rules.staleness and self.rules.gathering is not None:
            tasks = {name: next(iter(opened.held[name].values())) for name in there if opened.held[name]}
            self._late = opened.late | {name: (phase, task) for name, task in tasks.items()}
            there = []
        for name in there:
            if opened.held[name]:  # what it may send yet comes too late
                kept = tuple(t.client for t in opened.timed.get(name, ()))
                out.append(self._drop(name, phase, kept))
        out.append(UpdateServer(phase))
        lines = {} if opened.predicted_s is None else {name: opened.line(name) for name in opened.held}
        last = phase.number + 1 == self.rules.passes
        for name, timed in opened.timed.items():  # from here on other lines are believed
            if last:  # a client takes another time in each pass: the last one's is what is predicted and written down
                self._scheduler.throughput.record(phase.round, self._scheduler.number(name), timed)
            self._scheduler.keep(timed)
        trained = {t.client for timed in opened.timed.values() for t in timed}
        if not last:
            self._passed.append(opened)
            self._cohort = np.array(sorted(trained), dtype=np.int64)
            return [*out, *self._open_phase(PhaseId(phase.round, phase.attempt, phase.number + 1))]
        late, asked = self._scheduler.late, self._asked.tolist()
        record = record_of(opened, self._passed, asked, lines=lines, late=late, why=why)
        return [*out, CommitRound(record), *self._open_phase(PhaseId(phase.round + 1))]

    def _try_again(self, phase: PhaseId) -> list[CoordinatorInstruction]:
        """Those that are away are waited for first: it may be that only sites are back whose updates are refused."""
        if self.rules.gathering is None:
            return self._open_phase(phase)
        self._next, self._phase = phase, "joining"
        return self._gather()

    # Losses

    def _expel(self, executor: str, reason: str) -> list[CoordinatorInstruction]:
        """Dismiss an executor that sent an invalid message."""
        return [DismissExecutor(executor, reason), *self._lose(executor, reason)]

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
        orphaned = forget_executor(executor, opened)
        if self._scheduler.pinned or not orphaned:
            return [*assign_idle(opened, self._scheduler, holds=self._steals), *self._look()]
        names = [name for name in self._present() if name in opened.held]
        if not names:  # nobody who is left has the phase's broadcast
            self._open, phase = None, opened.phase
            return self._open_phase(PhaseId(phase.round, phase.attempt + 1, phase.number))
        return [*reassign(orphaned, names, opened, self._scheduler, holds=self._steals)]

    def _end(self, outcome: Outcome, reason: str = "") -> list[CoordinatorInstruction]:
        self._phase, self._open = "done", None
        return [Halt(), FinishRounds(outcome, reason)]
