"""The coordinator's side of a federated run: the `FederatedCoordinator`, and what its host would otherwise decide.

    who is lost (session/session.py) ─► coordinator ─► its port, lines for people
                                          ▲  │
    keys, shares ─► secure aggregation ◄──┴──┘ where sums are masked

It has no phases of its own: those are the coordinator's, whose clock goes on when its host looks. The host over TCP and
the simulator drive the same machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import filterfalse

from isthmus.planners.cohort import CohortSchedule
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import FinishRounds, RoundRecord
from isthmus.protocol.federated_messages import (
    ExecutorJoined,
    ExecutorOrder,
    ExecutorReport,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    PhaseSetup,
    RefusedUpdate,
    SumsSent,
)
from isthmus.protocol.federated_planning import PlanningProblem
from isthmus.protocol.federated_ports import FederatedPort
from isthmus.protocol.secure_coordinator import SecureCoordinator, TakeMasksOff, Unmasking
from isthmus.protocol.secure_messages import SecureOrder, SecureReport
from isthmus.session.deadlines import STARTING, Deadlines, Waits
from isthmus.session.failures import Loss
from isthmus.session.session import Observation, Session


class FederatedRunMachine(Session):
    """It is the port of the coordinator and of secure aggregation. Its host sets `port`; the run ends by `finished`."""

    port: FederatedPort

    def __init__(self, coordinator: FederatedCoordinator, *, timeout_s: float, notes_waits: bool = True) -> None:
        """`timeout_s`: for a process that was started for the run to join; how long sites may take the coordinator's
        rules say. `notes_waits`: a person watches, and the host looks often."""
        super().__init__(lambda _: None, timeout_s=timeout_s, grace_s=0.0)  # executors do not accuse each other
        self.coordinator = coordinator
        coordinator.port = self
        self._timeout_s = timeout_s
        self._notes_waits = notes_waits
        self._returns = coordinator.rules.gathering is not None
        """Whether a lost executor may come back: one's failure does not end the run."""
        self._joining = Waits(self._note)
        self._lags = Deadlines(timeout_s, 0.0, self._note)
        self._began_s: float | None = None
        """When the host looked first."""
        self._missing = set(coordinator.executors)
        """Executors that were never connected."""
        self._reasons: dict[str, str] = {}
        """Why executors were lost that are not back."""
        self._behind: set[str] = set()
        """Sites whose last round ended without them."""
        self._phase: PhaseId | None = None
        """That was opened last."""
        rules = coordinator.rules.secure
        self._secure: SecureCoordinator | None = None
        if rules is not None:
            self._secure = SecureCoordinator(rules)
            self._secure.port = self
        self._left_out: set[str] = set()
        """Sites that were left out of the phase that was opened last."""
        self._finish: FinishRounds | None = None

    @property
    def over(self) -> bool:
        return self._finish is not None

    @property
    def expected(self) -> Collection[str]:
        return () if self._returns else self._missing

    @property
    def concerned(self) -> Collection[str]:
        return self.coordinator.executors

    @property
    def due_s(self) -> float | None:
        times = [self.coordinator.due_s, super().due_s]
        if self.expected and self._began_s is not None:
            limits_s = (self._began_s + self._timeout_s, self._began_s + STARTING * self._timeout_s)
            times.append(next((time_s for time_s in limits_s if time_s > self.now_s), None))
        if self._secure is not None:
            times.append(self._secure.due_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    # What the host says

    def joined(self, executor: str) -> None:
        """An executor's process, or a site, is connected. It joins by a report of its own."""
        if self.over:
            return
        self._missing.discard(executor)
        self.connected.add(executor)
        if self._reasons.pop(executor, None) is not None:
            self._note(f"{self._who} {executor} is back")

    def refused(self, executor: str, reason: str) -> None:
        """It sent values that cannot be believed."""
        if self.is_here(executor) and not self.over:
            self.port.dismiss(executor, reason)
            self.disbelieve(executor, reason)

    def heard(self, executor: str, report: ExecutorReport | SecureReport) -> None:
        if self.over:
            return
        if not isinstance(report, ExecutorJoined) and not self._was_opened(report.phase):
            self._on_unopened(executor, report)
        elif isinstance(report, SecureReport):
            if self._secure is not None:
                self._secure.heard(executor, report)
        elif isinstance(report, SumsSent) and self._secure is not None:
            self._on_masked(self._secure, executor, report)
        else:
            self.coordinator.heard(executor, report)

    def interrupted(self) -> None:
        """The user wants to stop."""
        if not self.over:
            self.coordinator.interrupted()

    def under_way(self) -> None:
        """The executors have their tasks: there is time to plan the next round."""
        if not self.over:
            self.coordinator.under_way()

    def _was_opened(self, phase: PhaseId) -> bool:
        rules = self.coordinator.rules
        tried = phase.attempt < rules.attempts or not self._returns  # where executors stay lost, more are made
        begun = self._phase is not None and phase <= self._phase
        return begun and rules.first_round <= phase.round and phase.number < rules.passes and tried

    def _on_unopened(self, executor: str, report: PhaseReport | SecureReport) -> None:
        if isinstance(report, SumsSent):
            self.port.ignore(executor, report.phase)
        self.refused(executor, f"sent {type(report).__name__} of {report.phase}, which was not opened")

    # Who is lost

    def missed(self) -> Iterable[tuple[str, str]]:
        if self._began_s is None:
            self._began_s = self.now_s
        return super().missed()

    def lost(self, loss: Loss) -> None:
        if loss.cause == "job" and not self._returns:
            self.finished(FinishRounds("failed", loss.reason))
            return
        executor, reason = loss.device, loss.reason
        self.connected.discard(executor)
        self._reasons[executor] = reason
        self.coordinator.lost(executor, reason)
        if (secure := self._masks) is not None:
            secure.gone(executor)
        if self._finish is None or reason not in self._finish.reason:
            self._note(f"{self._who} {executor} was lost: {reason}")

    # Time

    def looked(self, seen: Observation) -> None:
        super().looked(seen)
        if self.over:
            return
        if self._notes_waits:
            self._note_waits(self.now_s)
        if (secure := self._masks) is not None:
            secure.clock(self.now_s)
        self.coordinator.clock(self.now_s)

    # Lines for people

    @property
    def _who(self) -> str:
        return "site" if self._returns else "executor"

    def _note(self, text: str) -> None:
        self.port.note(text)

    def _note_waits(self, now_s: float) -> None:
        joining = self.coordinator.phase == "joining"
        missing = set(filterfalse(self.is_here, self.coordinator.executors)) if joining else set[str]()
        what = "for sites that left" if self._returns and missing - self._missing else "to join"
        until = self._until(now_s, missing)
        if self._returns and self._all_left(missing):
            missing = {f"all {len(missing)}"}  # the line of each one that left has its reason
        self._joining.look(what, missing, now_s, until=until)
        self._lags.lag(*self.coordinator.behind, now_s)

    def _all_left(self, missing: Collection[str]) -> bool:
        """Whether several were here, and nobody is any more."""
        return 1 < len(missing) == len(self.coordinator.executors) and self._missing.isdisjoint(missing)

    def _until(self, now_s: float, missing: Collection[str]) -> str:
        """Return which sites the run waits for, how the wait ends, and why sites left."""
        if (waiting := self.coordinator.waiting) is None:
            return ""
        count = len(self.coordinator.executors)
        here = f"{count - len(missing)} of {count} sites are here"
        end = f"the round begins with {waiting.needed}"
        if waiting.until_s is None and waiting.needed > 1:
            end = f"{end}; for fewer, set deployment.start"
        elif waiting.until_s is not None:
            left = f"in {max(0.0, waiting.until_s - now_s):.0f} s"
            end = f"{left} the round begins without the others" if waiting.goes_on else f"{end}, {left} the run ends"
        if self._all_left(missing):
            return f" ({end})"
        gone = "; ".join(f"{name} left: {self._reasons[name]}" for name in sorted(missing) if name in self._reasons)
        return f" ({here}; {end}{'; ' if gone else ''}{gone})"

    # What the coordinator asks

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        if isinstance(order, PhaseOpened):
            self._on_opened(order.opening.phase)
        elif isinstance(order, PhaseDropped) and self._returns and not order.again:
            self._on_missed(executor, order.phase.round + 1)
        self.port.notify(executor, order)

    def opened(self, phase: PhaseId, executors: frozenset[str]) -> None:
        if executors:
            self._left_out = set()
            if (secure := self._masks) is not None:
                secure.opened(phase, executors)

    def plan(self, round_: int, problem: PlanningProblem) -> CohortSchedule:
        return self.port.plan(round_, problem)

    def merge(self, executor: str, phase: PhaseId) -> None:
        if executor in self._behind:
            self._behind.remove(executor)
            self._note(f"site {executor} is in time again")
        self.port.merge(executor, phase)

    def ignore(self, executor: str, phase: PhaseId) -> None:
        self.port.ignore(executor, phase)

    def dismiss(self, executor: str, reason: str) -> None:
        self.connected.discard(executor)
        self._note(f"{self._who} {executor} {reason}: dismissed")
        self.port.dismiss(executor, reason)

    def unmask_sums(self, phase: PhaseId, executors: frozenset[str]) -> None:
        if (secure := self._masks) is not None:
            secure.sums_wanted(phase, executors)

    def update_server(self, phase: PhaseId, opening: PhaseSetup | None = None) -> None:
        self.port.update_server(phase, opening)

    def commit(self, record: RoundRecord) -> None:
        self.port.commit(record)

    def finished(self, finish: FinishRounds) -> None:
        self._finish = finish
        self.port.finished(finish)

    def _on_opened(self, phase: PhaseId) -> None:
        attempt = (phase.round, phase.attempt)
        if phase.attempt and (self._phase is None or attempt != (self._phase.round, self._phase.attempt)):
            self._note(f"round {phase.round + 1} is tried again: attempt {phase.attempt + 1}")
        self._phase = phase

    def _on_missed(self, site: str, round_: int) -> None:
        if site not in self._behind:
            self._behind.add(site)
            ended = f"round {round_} ended without its update, which is ignored if it comes"
            self._note(f"site {site}: {ended}; rounds do not wait for this site until it is in time again")

    # Masked sums

    @property
    def _masks(self) -> SecureCoordinator | None:
        """None where sums are not masked, and when the run is over."""
        return None if self.over else self._secure

    def _on_masked(self, secure: SecureCoordinator, site: str, sums: SumsSent) -> None:
        """An update that is masked with others, or the news that there is none."""
        if sums.phase == self._phase and site in self._left_out:
            self.port.ignore(site, sums.phase)
            return
        is_due = self.coordinator.rounds_late(site, sums.phase) == 0 and self.coordinator.phase == "running"
        if sums.timed and is_due and not secure.takes(site, sums.phase):
            reason = "sent an update before it had keys to mask it with"
            self.port.ignore(site, sums.phase)
            self.refused(site, reason)
            return
        self.coordinator.heard(site, sums)
        if not (sums.timed or self.over):
            secure.gone(site)

    # What secure aggregation asks

    def tell(self, site: str, order: SecureOrder) -> None:
        self.port.tell(site, order)

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        self.coordinator.now_s = self.now_s  # a phase that opens next opens now
        found = self.port.take_masks_off(recovered)
        for holder, owner in sorted(found.wrong):
            what = f"the share that {owner} dealt and {holder} revealed is wrong: one of the two lies"
            self._note(f"round {recovered.phase.round + 1}: {what}")
        return found

    def unmasked(self, phase: PhaseId, reason: str) -> None:
        if reason:
            self._note(f"round {phase.round + 1}: {reason}")
        self.coordinator.unmasked(reason)

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        """As if each had said that it has no update of the phase."""
        self._left_out |= set(sites)
        for site in sites:
            if self.is_here(site) and self.coordinator.rounds_late(site, phase) == 0:
                self._note(f"site {site}: left out of round {phase.round + 1}: {reason}")
                refused = (RefusedUpdate(self.coordinator.clients[site], reason),)
                self.coordinator.heard(site, SumsSent(phase=phase, timed=(), refused=refused))
