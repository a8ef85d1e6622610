"""The coordinator's side of a federated run: the `FederatedCoordinator`, and what its host would otherwise decide.

    connections that open and close, failures ─┐
    ticks: processes that ended, time limits ──┴─► who is lost ─► coordinator ─► instructions, lines for people
                                                                    ▲  │
                          keys, shares ─► secure aggregation ◄──────┴──┘ where sums are masked

It has no phases of its own: those are the coordinator's. Pure: time comes with ticks. The host over TCP and the
simulator drive the same machine.
"""

from __future__ import annotations

from collections.abc import Collection

from isthmus.protocol.deadlines import Deadlines, Waits
from isthmus.protocol.failures import CLOSED, EXIT_S
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    CoordinatorEvent,
    CoordinatorInstruction,
    DismissExecutor,
    ExecutorConnected,
    ExecutorDisconnected,
    ExecutorLost,
    FederatedEvent,
    FederatedInstruction,
    FinishRounds,
    IgnoreSums,
    MergeSums,
    Notify,
    ReportRefused,
    TellSite,
    Tick,
    Unmasked,
    UnmaskSums,
)
from isthmus.protocol.federated_messages import (
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    RefusedUpdate,
    SumsSent,
)
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.run_events import Note
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_coordinator import SecureCoordinator, TakeMasksOff
from isthmus.protocol.secure_messages import (
    KeysSent,
    SecureOrder,
    SecureReport,
    SharesDisputed,
    SharesRevealed,
    SharesSent,
)

Out = list[FederatedInstruction]
EXIT_GRACE_S = 0.5
"""How long to wait for the exit of a process that cannot go on: it says more. One of which no more is known than that
its connection closed has `EXIT_S`."""


class FederatedRunMachine:
    """Events in, instructions out. The run is over with `FinishRounds`."""

    def __init__(
        self,
        coordinator: FederatedCoordinator,
        *,
        timeout_s: float,
        exit_grace_s: float = EXIT_GRACE_S,
        notes_waits: bool = True,
    ) -> None:
        """`timeout_s`: for a process that was started for the run to join; how long sites may take the coordinator's
        rules say. `exit_grace_s` is 0 where the host knows of no processes. `notes_waits`: a person watches, and ticks
        come often."""
        self.coordinator = coordinator
        self._timeout_s = timeout_s
        self._exit_grace_s = exit_grace_s
        self._notes_waits = notes_waits
        self._returns = coordinator.rules.gathering is not None
        """Whether a lost executor may come back: one's failure does not end the run."""
        self._out: Out = []
        self._joining = Waits(self._note)
        self._lags = Deadlines(timeout_s, 0.0, self._note)
        self._tick = Tick(now_s=0.0)
        self._join_by_s: float | None = None
        self._came: set[str] = set()
        """Executors that were connected once."""
        self._here: set[str] = set()
        """Those whose connection is of use."""
        self._ending: dict[str, tuple[str, float]] = {}
        """Those whose connection closed: why, and how long the run waits for the exit of their process."""
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
        self._opened: set[str] = set()
        """Who was sent the opening of a phase, of which the secure machine is not told yet."""
        self._left_out: set[str] = set()
        """Sites that were left out of the phase that was opened last."""
        self._over = False

    @property
    def urgent(self) -> bool:
        """Whether the next tick is to come soon: a process's exit is about to be known."""
        return bool(self._ending)

    @property
    def due_s(self) -> float | None:
        """The time, by the clock of `Tick`, at which the next tick may decide something, if nothing else happens
        before."""
        times = [self.coordinator.due_s, *(until_s for _, until_s in self._ending.values())]
        if not self._returns and self._missing:
            times.append(self._join_by_s)
        if self._secure is not None:
            times.append(self._secure.due_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def is_here(self, executor: str) -> bool:
        """Whether messages to it make sense."""
        return executor in self._here

    def handle(self, event: FederatedEvent) -> Out:
        """Take one event; return what to do now."""
        if self._over:
            return []
        match event:
            case Tick():
                self._on_tick(event)
            case ExecutorConnected(executor=executor):
                self._on_connected(executor)
            case ExecutorDisconnected(executor=executor, reason=reason):
                if executor in self._here:
                    self._on_ended(executor, reason)
            case ReportRefused(executor=executor, reason=reason):
                if executor in self._here:
                    self._out.append(DismissExecutor(executor, reason))
                    self._on_ended(executor, reason)
            case FromDevice(device=executor, body=DeviceFailed() as failed):
                self._on_failed(executor, failed)
            case FromDevice(device=executor, body=report) if isinstance(
                report, PhaseReport | SecureReport
            ) and not self._was_opened(report.phase):
                self._on_unopened(executor, report)
            case FromDevice(device=site, body=KeysSent() | SharesSent() | SharesDisputed() | SharesRevealed() as body):
                if (secure := self._masks) is not None:
                    secure.heard(site, body)
            case Unmasked(phase=phase, reason=reason, wrong=wrong):
                for holder, owner in wrong:
                    what = f"the share that {owner} dealt and {holder} revealed is wrong: one of the two lies"
                    self._note(f"round {phase.round + 1}: {what}")
                if (secure := self._masks) is not None:
                    secure.tried(phase, reason, wrong)
                if not reason:  # else more shares may come
                    self._coordinate(event)
            case FromDevice(device=site, body=SumsSent() as sums) if self._secure is not None:
                self._on_masked(self._secure, site, sums)
            case _:
                self._coordinate(event)
        out, self._out = self._out, []
        return out

    # Who is here

    @property
    def _missing(self) -> list[str]:
        """Who has never been here."""
        return sorted(set(self.coordinator.executors) - self._came)

    def _on_connected(self, executor: str) -> None:
        self._came.add(executor)
        self._here.add(executor)
        if self._reasons.pop(executor, None) is not None:
            self._note(f"{self._who} {executor} is back")

    def _was_opened(self, phase: PhaseId) -> bool:
        rules = self.coordinator.rules
        tried = phase.attempt < rules.attempts or not self._returns  # where executors stay lost, more are made
        begun = self._phase is not None and phase <= self._phase
        return begun and rules.first_round <= phase.round and phase.number < rules.passes and tried

    def _on_unopened(self, executor: str, report: PhaseReport | SecureReport) -> None:
        if isinstance(report, SumsSent):
            self._out.append(IgnoreSums(executor, report.phase))
        if executor in self._here:
            reason = f"sent {type(report).__name__} of {report.phase}, which was not opened"
            self._out.append(DismissExecutor(executor, reason))
            self._on_ended(executor, reason)

    def _on_failed(self, executor: str, failed: DeviceFailed) -> None:
        if failed.fault == "user" and not self._returns:
            self._over = True
            self._out += [Halt(), FinishRounds("failed", failed.reason)]
        elif executor in self._here:
            self._on_ended(executor, failed.reason)

    def _on_ended(self, executor: str, reason: str) -> None:
        """Its connection is of no more use. How its process ended says more, and is known a little later."""
        self._here.discard(executor)
        if self._exit_grace_s and executor not in self._tick.ended:
            grace_s = EXIT_S if reason == CLOSED else self._exit_grace_s
            self._ending[executor] = reason, self._tick.now_s + grace_s
        else:
            self._lose(executor, reason)

    def _lose(self, executor: str, reason: str) -> None:
        self._here.discard(executor)
        reason = self._reasons[executor] = self._tick.ended.get(executor, reason)
        self._coordinate(ExecutorLost(executor=executor, reason=reason))
        if (secure := self._masks) is not None:
            secure.gone(executor)
        finish = self._out[-1] if self._over else None
        if not isinstance(finish, FinishRounds) or reason not in finish.reason:
            self._note(f"{self._who} {executor} was lost: {reason}")

    # Time

    def _on_tick(self, tick: Tick) -> None:
        self._tick = tick
        if self._join_by_s is None:
            self._join_by_s = tick.now_s + self._timeout_s
        known = [name for name, (_, by_s) in self._ending.items() if name in tick.ended or tick.now_s >= by_s]
        for name in known:
            reason, _ = self._ending.pop(name)
            if not self._over:
                self._lose(name, reason)
        if self._over:
            return
        if self._notes_waits:
            self._note_waits(tick.now_s)
        if (secure := self._masks) is not None:
            secure.clock(tick.now_s)
        self._coordinate(tick)
        if not (self._over or self._returns):
            self._miss(tick, self._join_by_s)

    def _miss(self, tick: Tick, join_by_s: float) -> None:
        """One that never joined, of processes that were started for the run."""
        missing = self._missing
        if missing and tick.now_s >= join_by_s:
            self._lose(missing[0], f"it did not join within {self._timeout_s:g} s")
        elif gone := [name for name in missing if name in tick.ended]:
            self._lose(gone[0], "its process ended before it joined")

    # Lines for people

    @property
    def _who(self) -> str:
        return "site" if self._returns else "executor"

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    def _note_waits(self, now_s: float) -> None:
        joining = self.coordinator.phase == "joining"
        missing = set(self.coordinator.executors) - self._here if joining else set[str]()
        what = "for sites that left" if self._returns and self._came & missing else "to join"
        until = self._until(now_s, missing)
        if self._returns and self._all_left(missing):
            missing = {f"all {len(missing)}"}  # the line of each one that left has its reason
        self._joining.look(what, missing, now_s, until=until)
        self._lags.lag(*self.coordinator.behind, now_s)

    def _all_left(self, missing: Collection[str]) -> bool:
        """Whether several were here, and nobody is any more."""
        return 1 < len(missing) == len(self.coordinator.executors) and self._came.issuperset(missing)

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

    # The coordinator

    def _coordinate(self, event: CoordinatorEvent) -> None:
        for instruction in self.coordinator.handle(event):
            self._follow(instruction)
        if self._opened and self._phase is not None:
            sites, self._opened = frozenset(self._opened), set()
            self._left_out = set()
            if (secure := self._masks) is not None:
                secure.opened(self._phase, sites)

    def _follow(self, instruction: CoordinatorInstruction) -> None:
        match instruction:
            case Notify(executor=executor, body=PhaseOpened(opening=opening)):
                self._on_opened(opening.phase)
                if self._secure is not None:
                    self._opened.add(executor)
            case UnmaskSums(phase=phase, executors=summed):
                if (secure := self._masks) is not None:
                    secure.sums_wanted(phase, summed)
                return
            case Notify(executor=executor, body=PhaseDropped(phase=phase, again=False)) if self._returns:
                self._on_missed(executor, phase.round + 1)
            case MergeSums(executor=executor) if executor in self._behind:
                self._behind.remove(executor)
                self._note(f"site {executor} is in time again")
            case DismissExecutor(executor=executor, reason=reason):
                self._here.discard(executor)
                self._note(f"{self._who} {executor} {reason}: dismissed")
            case FinishRounds():
                self._over = True
            case _:
                pass
        self._out.append(instruction)

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
        return None if self._over else self._secure

    def _on_masked(self, secure: SecureCoordinator, site: str, sums: SumsSent) -> None:
        """An update that is masked with others, or the news that there is none."""
        if sums.phase == self._phase and site in self._left_out:
            self._out.append(IgnoreSums(site, sums.phase))
            return
        is_due = self.coordinator.rounds_late(site, sums.phase) == 0 and self.coordinator.phase == "running"
        if sums.timed and is_due and not secure.takes(site, sums.phase):
            reason = "sent an update before it had keys to mask it with"
            self._out += [IgnoreSums(site, sums.phase), DismissExecutor(site, reason)]
            self._on_ended(site, reason)
            return
        self._coordinate(FromDevice(site, sums))
        if not (sums.timed or self._over):
            secure.gone(site)

    # What secure aggregation asks

    def tell(self, site: str, order: SecureOrder) -> None:
        self._out.append(TellSite(site, order))

    def take_masks_off(self, recovered: TakeMasksOff) -> None:
        self._out.append(recovered)

    def sums_lost(self, phase: PhaseId, reason: str) -> None:
        self._note(f"round {phase.round + 1}: {reason}")
        self._coordinate(Unmasked(phase=phase, reason=reason))

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        """As if each had said that it has no update of the phase."""
        self._left_out |= set(sites)
        for site in sites:
            if site in self._here and self.coordinator.rounds_late(site, phase) == 0:
                self._note(f"site {site}: left out of round {phase.round + 1}: {reason}")
                refused = (RefusedUpdate(self.coordinator.clients[site], reason),)
                self._coordinate(FromDevice(site, SumsSent(phase=phase, timed=(), refused=refused)))
