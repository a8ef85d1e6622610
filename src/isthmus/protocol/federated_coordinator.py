"""The federated coordinator: which clients, on which executor, and when a round is over.

    joining ──enough here──► phase open ──all in, quorum, or deadline──► absorb ──last pass──► commit ──► next round
       ▲                          │                 │                         └──► next pass, same cohort
       └──too few here────────────┴──too few in──► dropped, tried again

The sums of a lost executor are lost: its clients go to the other executors. An executor that runs out of clients steals
clients that another has not begun. Sums are exact and random streams belong to clients, so the bits do not depend on
which executor trains which client. Each site has one client, which no other site takes. A site that reconnects is used
again. Masked sums are unmasked before `absorb` (`secure_coordinator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.protocol.federated_events import FinishRounds, Outcome, RoundRecord
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorDrained,
    ExecutorJoined,
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
from isthmus.protocol.federated_phase import OpenPhase
from isthmus.protocol.federated_ports import CoordinatorPort
from isthmus.protocol.federated_reports import fault_of, has_diverged, record_of, refusal_texts
from isthmus.protocol.federated_rules import RoundRules, Waiting, Why
from isthmus.protocol.federated_scheduler import ClientScheduler
from isthmus.protocol.federated_throughput import ThroughputModel
from isthmus.protocol.work_stealing import Order, assign_idle, assign_returned, forget_executor, grant_tasks, reassign
from isthmus.session.program import JOINING, OVER, OutOfPhase, Policy, report

Integers = NDArray[np.int64]


class FederatedCoordinator(Policy[CoordinatorPort]):
    """The machine; its host sets `port`. It keeps which is each client's state: a number, 4 bytes a client, part of
    what a commit saves.

    An executor that trains a client reports the state's number, and receives it when the client is trained again. Only
    the executors, which keep the states, know what a number means.
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
        super().__init__(JOINING)
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
        self.now_s = 0.0
        """The host's clock, when it was looked at last."""

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
        if gathering is None or self.phase != "joining":
            return None
        if self._next == PhaseId(0):
            return Waiting(gathering.start, None)
        since_s = self.now_s if self._since_s is None else self._since_s
        if here < self.rules.minimum:
            return Waiting(self.rules.minimum, since_s + self.rules.deadline_s)
        return Waiting(len(self.executors), since_s + gathering.wait_s, goes_on=True)

    @property
    def due_s(self) -> float | None:
        """The time, by the host's clock, at which the next tick may decide something, if nothing else happens
        before."""
        if self._open is not None:
            return None if self.phase == "unmasking" else self._open.opened_s + self.rules.deadline_s
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

    def is_late(self, device: str, body: ExecutorReport) -> bool:
        if self.over or isinstance(body, ExecutorJoined):
            return False
        if self.phase == "unmasking":
            return True  # what is in the sum cannot change any more
        late = self.rounds_late(device, body.phase)
        return late is None or (late > 0 and not isinstance(body, SumsSent)) or device not in self._alive

    def dropped(self, device: str, body: PhaseReport) -> None:
        self._catches_up(device, body)
        if isinstance(body, SumsSent):
            if self._open is not None and body.phase == self._open.phase:
                self._open.lose(device)
            self.port.ignore(device, body.phase)

    # What the host says

    def lost(self, executor: str, reason: str) -> None:
        if not self.over:
            self._lose(executor, reason)

    def clock(self, now_s: float) -> None:
        if self.over:
            return
        self.now_s = now_s
        if self.phase == JOINING:
            self._gather()
        else:
            self._look()

    def interrupted(self) -> None:
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
            self._plan(following, self._cohort_of(following), self._present())

    def unmasked(self, reason: str) -> None:
        """The masks are off. With a reason: they stay on, and no update of the phase is of use."""
        if self.over:
            return
        if self.phase != "unmasking" or self._open is None:
            raise OutOfPhase(f"sums were unmasked in phase {self.phase!r}")
        self.phase = "running"
        if reason:
            self._open.done, self._open.reasons = 0, [*self._open.reasons, reason]
        self._close_phase(self._why)

    def _catches_up(self, executor: str, report: PhaseReport) -> None:
        """The executor is done with an earlier phase. Its messages of still earlier phases do not change that."""
        if isinstance(report, TasksReturned):
            return
        if self._behind.get(executor) == report.phase:
            del self._behind[executor]
        if executor in self._late and self._late[executor][0] == report.phase:
            del self._late[executor]

    def _plan(self, round_: int, cohort: Integers, alive: Sequence[str]) -> None:
        self._scheduler.take(self.port.plan(round_, self._scheduler.ask(round_, cohort, alive)))

    def _send(self, orders: Iterable[Order]) -> None:
        for executor, order in orders:
            self.port.notify(executor, order)

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
        if here < len(self.executors):
            if gathering is None:
                return
            if self._next == PhaseId(0):
                if here < gathering.start:
                    return
            elif here < self.rules.minimum:
                if self.now_s - self._since_s >= self.rules.deadline_s:
                    sites = "1 site was" if here == 1 else f"{here} sites were"
                    waited = f"{sites} here for {self.rules.deadline_s:g} s"
                    self._end("lost", f"round {self._next.round + 1}: {waited}, expected {self.rules.minimum}")
                return
            elif self.now_s - self._since_s < gathering.wait_s:
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
        """Whether every client was drawn by itself, and none was: nobody need be there."""
        begins = self.rules.poisson and not (phase.number or self._late) and phase.round < self.rules.rounds
        waits = self.rules.gathering is not None and len(self._alive) < self.rules.minimum
        return begins and not waits and not len(self._cohort_of(phase.round))

    def _open_drawn(self, phase: PhaseId) -> None:
        self._next = phase
        if phase.round >= self.rules.rounds:
            self._end("done")
            return
        if self.rules.gathering is not None and len(self._alive) < self.rules.minimum:
            self.phase = JOINING
            self._gather()
            return
        self._drop_stale(phase)
        if not phase.number and (not phase.attempt or self.rules.gathering is not None):
            ahead = self._scheduler.cohort_ahead(phase.round)
            self._cohort = self._cohort_of(phase.round) if ahead is None else ahead
        if not phase.number:
            self._asked, self._passed = self._cohort, []
            self._scheduler.late = self._late_of(phase.round)
        alive = self._free()
        if not self._scheduler.is_planned(phase.round, self._cohort, alive):
            self._plan(phase.round, self._cohort, alive)
        self._begin_phase(phase, alive)

    def _begin_phase(self, phase: PhaseId, alive: Sequence[str]) -> None:
        assignment = self._scheduler.assignment(self._cohort, alive)
        expected = sum(map(len, assignment.tasks.values())) + len(self._late)
        needed = len(self._asked) if self.rules.poisson else self.rules.needed
        enough = min(self.rules.enough(needed), expected)
        opened = OpenPhase(phase=phase, opened_s=self.now_s, enough=enough, line=self._scheduler.line)
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
            self.port.notify(name, PhaseOpened(opening=opening, tasks=mine, holds=holds, brief=brief))
        opened.unassigned.sort(key=lambda t: -t.samples)
        self.port.opened(phase, frozenset(opened.held))
        if not expected:
            self._close_phase("all")

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
        self._send(assign_idle(opened, self._scheduler, holds=self._steals))

    @report(TasksReturned, "running")
    def _on_returned(self, victim: str, returned: TasksReturned) -> None:
        """It may be answered while a client of an earlier phase is trained."""
        opened = self._opened
        thief = opened.recalls.pop(victim, None)
        if thief is None or not opened.take(victim, returned.tasks):
            self._expel(victim, "gave back clients that it was not given")
        else:
            self._send(assign_returned(returned.tasks, thief, opened, self._scheduler, holds=self._steals))

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
        self.port.merge(executor, sums.phase)
        if self.rules.gathering is not None:  # sites do not know of them: the coordinator looks at what they send
            for refusal in sums.refused:
                self.port.notify(executor, UpdateRefused(phase=sums.phase, reason=refusal.reason))
        if self.rules.single and opened.unassigned and not late:
            self._send([grant_tasks(executor, (opened.unassigned.pop(0),), opened, holds=False)])
        self._look()

    @property
    def _opened(self) -> OpenPhase:
        assert self._open is not None, "a report is late while no phase is open"
        return self._open

    def _look(self) -> None:
        """Close the phase where it is over."""
        if (opened := self._open) is None or self.phase == "unmasking":
            return
        behind = sum(len(opened.held.get(name, ())) for name in self._behind)
        if self.rules.quorum == 1:  # else they may be among those that make a quorum
            behind += len(opened.late)
        open_s = self.now_s - opened.opened_s
        why = self.rules.why_over(opened.outstanding, opened.done, opened.enough, open_s, behind)
        if why is None:
            return
        if self.rules.secure is not None and opened.done >= self.rules.minimum:
            self.phase, self._why = "unmasking", why
            self.port.unmask_sums(opened.phase, frozenset(name for name, timed in opened.timed.items() if timed))
        else:
            self._close_phase(why)

    # Its end

    def _close_phase(self, why: Why) -> None:
        opened, self._open = self._opened, None
        phase = opened.phase
        there = [name for name in opened.held if name in self._alive]
        if opened.done < self.rules.minimum:
            self._drop_phase(opened, there, why)
            return
        if self.rules.staleness and self.rules.gathering is not None:
            tasks = {name: next(iter(opened.held[name].values())) for name in there if opened.held[name]}
            self._late = opened.late | {name: (phase, task) for name, task in tasks.items()}
            there = []
        for name in there:
            if opened.held[name]:  # what it may send yet comes too late
                self._drop(name, phase, tuple(t.client for t in opened.timed.get(name, ())))
        self.port.update_server(phase)
        lines = {} if opened.predicted_s is None else {name: opened.line(name) for name in opened.held}
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
        if phase.attempt + 1 >= self.rules.attempts or (why == "all" and self.rules.gathering is None):
            what = f"round {phase.round + 1}: {opened.done} clients were in, expected at least {self.rules.minimum}"
            each = f"{self.rules.deadline_s:g} s" if why == "deadline" else ""
            tries = f"{phase.attempt + 1} attempts" if phase.attempt else ""
            after = f", after {' of '.join(filter(None, (tries, each)))}" if tries or each else ""
            reason = "; ".join([what + after, *opened.reasons, *refusal_texts(opened.refused)])
            self._end("diverged" if has_diverged(opened, why) else "lost", reason)
            return
        again = PhaseId(phase.round, phase.attempt + 1, phase.number)
        if self.rules.gathering is None:
            self._open_phase(again)
        else:  # those that are away are waited for: it may be that only sites are back whose updates are refused
            self._next, self.phase = again, JOINING
            self._gather()

    # Losses

    def _expel(self, executor: str, reason: str) -> None:
        """Dismiss an executor that sent an invalid message."""
        self.port.dismiss(executor, reason)
        self._lose(executor, reason)

    def _lose(self, executor: str, reason: str) -> None:
        joining, returns = self.phase == JOINING, self.rules.gathering is not None
        if executor not in self._alive and (returns or not joining):
            return
        self._alive.discard(executor)
        self._behind.pop(executor, None)
        for late in (self._late, {} if self._open is None else self._open.late):
            late.pop(executor, None)
        if not returns and (not self._alive or joining):
            self._end("lost", f"executor {executor!r} was lost: {reason}")
        elif self._open is not None:
            self._open.reasons.append(f"executor {executor!r}: {reason}")
            self._go_on_without(executor, self._open)

    def _go_on_without(self, executor: str, opened: OpenPhase) -> None:
        orphaned = forget_executor(executor, opened)
        if self._scheduler.pinned or not orphaned:
            self._send(assign_idle(opened, self._scheduler, holds=self._steals))
            self._look()
        elif names := [name for name in self._present() if name in opened.held]:
            self._send(reassign(orphaned, names, opened, self._scheduler, holds=self._steals))
        else:  # nobody who is left has the phase's broadcast
            self._open, phase = None, opened.phase
            self._open_phase(PhaseId(phase.round, phase.attempt + 1, phase.number))

    def _end(self, outcome: Outcome, reason: str = "") -> None:
        self.phase, self._open = OVER, None
        self.port.finished(FinishRounds(outcome, reason))
