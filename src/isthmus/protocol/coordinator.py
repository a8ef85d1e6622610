"""The coordinator: the life of a run. Events in, instructions out.

    joining ──all joined──► fetching ──► placing ──all ready──► running ──last item reported──► done
       ▲                    (what the                            │   └─interrupted─► closing ──saved──► done
       │                     plan moved)                         ├─ a better plan ─► settling ─┐
       └─────── planning ◄──all said what they hold── holding ◄──┴── a device is lost ─────────┘

It leases items ahead of the slowest device, so that no device waits for it, and commits a checkpoint once every
device has reported its part.

A lost device is fenced: a new plan epoch begins, and messages of older epochs are dropped. The remaining devices stop,
report what they hold (`recovery`), get a new plan, and go on from the latest step whose state is whole, in memory or
in the last checkpoint. A change to a better plan, for a device that leaves or for one that came, goes the same way, but
all devices finish their leased items first: then nothing is lost. A joining device gets its state before that, while
the others train (`state_transfer`). Where no device is left, or too few for any plan, the coordinator waits for lost
devices whose machines are there (`restarts`), without a time limit for those in the queue of a cluster's engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from isthmus.protocol.coordinator_events import (
    AssignStage,
    BeginEpoch,
    CallDevice,
    CommitCheckpoint,
    CoordinatorEvent,
    CoordinatorInstruction,
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    DeviceOffered,
    DevicesQueued,
    Disconnect,
    Ending,
    FinishRun,
    FleetChanged,
    ItemDone,
    MakePlan,
    NoPlan,
    Order,
    PlanMade,
    ReleaseDevice,
    StopRequested,
)
from isthmus.protocol.failures import Attempts, StepFailure, Suspects
from isthmus.protocol.finite import Divergence
from isthmus.protocol.leases import ItemReports, Leases, evaluation_sums, mean_loss, non_finite
from isthmus.protocol.machine import EpochMachine, FromDevice
from isthmus.protocol.members import Members, Restarts
from isthmus.protocol.phases import COORDINATOR, CoordinatorStatistics, Phase
from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout, recovery_point
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReady,
    DeviceReport,
    FetchState,
    Halt,
    Inventory,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    SnapshotCopied,
    StateFetched,
    StateReceived,
    TransferEnded,
)
from isthmus.protocol.state_transfer import StateTransfer
from isthmus.protocol.work import RunSpec

Out = list[CoordinatorInstruction]


class Coordinator(EpochMachine[Phase, CoordinatorEvent, CoordinatorInstruction]):
    """The state machine of a run over the devices of one plan after another."""

    transitions = COORDINATOR

    def __init__(
        self,
        devices: Iterable[str],
        spec: RunSpec,
        epoch: int = 0,
        *,
        layout: StateLayout | None = None,
        lineage: Lineage | None = None,
    ) -> None:
        """Without a layout the run ends when a device is lost. `lineage` is of a run whose coordinator was started
        again, in a new epoch: `spec` begins from its last checkpoint, and devices may hold more."""
        super().__init__(epoch)
        self.devices = tuple(devices)
        self.spec = spec
        self.layout = layout or StateLayout(parts={})
        self.survives = layout is not None
        """Whether the run goes on when a device is lost."""
        self._lineage = lineage or Lineage()
        self._leases = Leases(spec, self.layout)
        self._step = self._saved = self._done_step = spec.start_step
        self._began = self._restarted = lineage is not None
        """Whether there may be more than the checkpoint to go on from; whether devices may be at work for an epoch
        before."""
        self.members = Members()
        self._next: StateLayout | None = None
        self._transfer: StateTransfer | None = None
        """The state transfer that prepares joining devices for the next plan."""
        self._transfers = 0
        self._awaited: set[str] = set()
        """Who is to be ready, or to have given what it holds."""
        self._reports = ItemReports()
        self._divergence = Divergence(spec.non_finite_steps)
        self._attempts = Attempts(spec.recovery_attempts)
        self._suspects = Suspects()
        self._recalls = Restarts()
        self._planned_for: frozenset[str] = frozenset()
        self._without_plan: frozenset[str] = frozenset()
        """There is no plan for these devices."""
        self._ending: Literal["done", "interrupted"] = "done"
        self._reason = ""

    @property
    def awaited(self) -> frozenset[str]:
        """The devices that it waits for before it goes on."""
        if self._phase == "joining":
            return frozenset(self.members.missing(self.devices))
        if self._phase == "holding":
            return self.members.silent
        if self._phase == "recalling":
            return self._recalls.awaited
        if self._phase == "settling" and self._transfer is not None and not self._leases.open:
            return self._transfer.waited_for
        return frozenset(self._awaited) if self._phase in ("fetching", "placing") else frozenset()

    @property
    def queued(self) -> frozenset[str]:
        """The devices without which there is no plan, that come whenever their engine starts them."""
        return self._recalls.queued if self._phase == "recalling" else frozenset()

    @property
    def leases(self) -> Leases:
        """Items that devices may be at work on."""
        return self._leases

    @property
    def behind(self) -> tuple[int, frozenset[str]]:
        """The oldest item that is not done by all, and who has not reported it while others have."""
        oldest = min(self._leases.open, default=-1)
        return oldest, self._reports.missing(oldest, self.devices)

    def statistics(self) -> CoordinatorStatistics:
        leases = self._leases
        return CoordinatorStatistics(
            self._phase, leases.finished, leases.leased, self._stale, self._epoch, max(self._saved, leases.acknowledged)
        )

    def _take(self, event: CoordinatorEvent) -> Out:
        match event:
            case DeviceJoined(device=device, holdings=holdings):
                return self._on_joined(device, holdings)
            case FromDevice(device=device, body=body):
                return self._on_report(device, body)
            case DeviceLost():
                return self._on_lost(event)
            case StopRequested():
                return self._on_interrupted()
            case PlanMade(layout=layout, worth_it=worth_it):
                return self._on_planned(layout, worth_it=worth_it)
            case NoPlan(reason=reason):
                return self._on_no_plan(reason)
            case DeviceOffered(device=device):
                self.members.offered(device)
                self._recalls.back(device)
                if self._phase == "recalling":
                    return self._begin_anew()
                if self._phase == "joining" and device in self.awaited:
                    return [CallDevice(device)]  # it is here, and does not know that it is awaited
                return self._reconsider()
            case DeviceLeaving(device=device):
                self.members.leaves(device)
                return self._reconsider(must=True)
            case DevicesQueued(devices=devices):
                self._recalls.wait_in_queue(devices)
                return self._begin_anew() if self._phase == "recalling" else []
            case FleetChanged():
                return self._reconsider()

    def _on_report(self, device: str, report: DeviceReport) -> Out:
        match report:
            case DeviceReady():
                return self._on_ready(device)
            case ItemReported():
                return self._on_item_reported(device, report)
            case DeviceFailed(failure=failure):
                return [] if failure is None else self._on_step_failed(device, failure)
            case Inventory(holdings=holdings):
                self.members.holds(device, holdings)
                return self._on_held()
            case StateFetched():
                self._awaited.discard(device)
                return self._place() if self._phase == "fetching" and not self._awaited else []
            case SnapshotCopied(of=of, step=step):
                return self._acknowledged(self._leases.snapshot_sources(of, step))
            case StateReceived() | TransferEnded():
                return self._on_state_received(device, report)

    # Joining, fetching, placing

    def _on_joined(self, device: str, holdings: Sequence[StateHolding]) -> Out:
        self.members.joined(device, holdings)
        self._recalls.at_work(device)
        if self._phase == "joining":
            return self._restore()
        if self._phase == "recalling":
            return self._begin_anew()
        if self._phase == "holding":
            return self._on_held()
        called = self._next is not None and device in self._next.parts
        if self._phase == "running" and called and self._next is not None:  # the work went on while it started
            return [] if self.members.missing(self._next.parts) else self._bring()
        return self._reconsider()

    def _restore(self) -> Out:
        """Once all are here: choose the state to go on from, and have what the plan moved brought here."""
        if self.members.missing(self.devices):
            return []
        if self._restarted:
            self._next = self.layout
            return self._hold()
        held = self.members.holdings if self._began else {}
        point = recovery_point(self.layout, held, self._lineage, self._saved)
        self._step, self._own = point.step, point.own
        self._lineage.begin(self._epoch, self._step)
        self._done_step = self._step
        self._divergence.restart()
        self._attempts.began()
        self._leases.begin(self._step, self.layout, due=self._began or self.spec.eval_due)
        out: Out = []
        if self.survives:
            out.append(BeginEpoch(self._epoch, self._step, self._leases.leased, not point.in_memory))
        self._phase, self._awaited = "fetching", set(point.donors)
        asks = {d: FetchState(step=self._step, parts=parts, epoch=self._epoch) for d, parts in point.donors.items()}
        return out + ([Order(d, ask) for d, ask in sorted(asks.items())] or self._place())

    def _place(self) -> Out:
        self._phase, self._awaited = "placing", set(self.devices)
        none = frozenset[str]()
        own = {d: self._own.get(d, none) & self.layout.parts.get(d, none) for d in self.devices}
        place = {d: Order(d, PlaceWeights(own=parts, epoch=self._epoch)) for d, parts in own.items()}
        return [step for d in self.devices for step in (AssignStage(d), place[d])]

    def _on_ready(self, device: str) -> Out:
        self._awaited.discard(device)
        if self._phase != "placing" or self._awaited:
            return []
        self._phase, self._began = "running", True
        if self._ending == "interrupted":
            return self._close()
        out = self._lease()
        if not self._leases.keeps:
            out += self._release()
        if self.members.leaving(self.devices):
            return out + self._reconsider(must=True)
        return out + self._reconsider() if self.members.available.difference(self.devices) else out

    # Running

    def _on_item_reported(self, device: str, report: ItemReported) -> Out:
        known = report.item in self._leases.open  # of others nothing is kept
        if not known or (reports := self._reports.add(device, report, self.devices)) is None:
            return []
        item = self._leases.finish(report.item)
        note_, ends = non_finite(item, reports, self._divergence)
        if ends:
            saved = f"the newest checkpoint is of step {self._saved}" if self._saved else "nothing was saved before"
            return [ItemDone(item, mean_loss(reports)), *self._end("diverged", f"{note_}; {saved}")]
        out: Out = [ItemDone(item, mean_loss(reports), note_, evaluation_sums(item, reports))]
        if item.kind == "save":
            self._saved = item.step
            out.append(CommitCheckpoint(item, finite=not note_))
        elif item.kind == "train":
            self._done_step = item.step + 1
            self._attempts.stepped()
            self._suspects.stepped(item.step, set(self.devices))
        elif item.kind == "keep":
            out += self._acknowledged(self._leases.kept(item.step))
        if self._phase == "running" or (self._phase == "settling" and not self._leases.at_period):
            out += self._lease()
        if not self._leases.open:
            out += self._move() if self._phase == "settling" else self._end(self._ending)
        return out

    def _acknowledged(self, step: int | None) -> Out:
        """A snapshot may be complete now."""
        return [] if step is None else [RetireSnapshots(step=step, epoch=self._epoch), *self._release()]

    def _release(self) -> Out:
        gone = self.members.released(self.devices)
        self._plan_without(gone)
        return [ReleaseDevice(device) for device in gone]

    def _lease(self) -> Out:
        out: Out = [OpenItem(item=item, epoch=self._epoch) for item in self._leases.lease()]
        return out or ([] if self._leases.open else self._end("done"))

    def _on_interrupted(self) -> Out:
        begins = self._phase in ("joining", "fetching", "placing") and not self._began
        waits = self._phase == "recalling" and not (self.members.here and self._recalls.awaited)
        if begins or waits:
            return self._end("interrupted")
        if self._phase == "closing" or self._leases.over:
            return []  # the run's last item is leased already: it ends as if nobody had asked
        self._ending = "interrupted"
        return self._close() if self._phase in ("running", "settling") else []

    def _close(self) -> Out:
        """Finish what is leased, save, leave."""
        self._phase = "closing"
        last = self._leases.last_step
        if self._leases.closing or last == self._saved:
            return [] if self._leases.open else self._end("interrupted")
        return [OpenItem(item=self._leases.lease_save(), epoch=self._epoch)]

    # Another plan, or fewer devices

    def _reconsider(self, *, must: bool = False) -> Out:
        """Ask whether another plan is better. Never in the middle of a change of plan: afterwards is soon enough."""
        if self._phase != "running" or not self.survives or (self._transfer is not None and not must):
            return []
        return [MakePlan(tuple(sorted(self._suspects.trusted(self.members.available))), must=must)]

    def _on_planned(self, layout: StateLayout, *, worth_it: bool) -> Out:
        if self._phase == "planning":
            return self._adopt(layout)
        if self._phase != "running" or not worth_it:
            return []
        out = self._stop_sending_state()
        self._next = layout
        missing = self.members.missing(layout.parts)
        return out + ([CallDevice(d) for d in missing] if missing else self._bring())

    def _bring(self) -> Out:
        """Whom the better plan needs is here: bring joining devices near to the others' state, then finish what is
        leased."""
        assert self._next is not None, "there is a better plan"
        if self._transfer is not None:
            return []
        needs = {d: parts for d, parts in self._next.parts.items() if parts and d not in self.devices}
        if not needs or not self.layout.repeats:
            return self._settle()
        holds = {d: self.layout.parts.get(d, frozenset[str]()) for d in self.devices}
        self._transfers += 1
        self._transfer = StateTransfer(self._transfers, self._leases.last_step, needs, holds, self._epoch)
        return [*self._transfer.begins()]

    def _on_state_received(self, device: str, event: StateReceived | TransferEnded) -> Out:
        transfer = self._transfer
        if transfer is None or event.number != transfer.number:
            return []
        if isinstance(event, TransferEnded):
            return self._stop_receiving_state()
        transfer.state_received(device, event.of, event.step)
        if self._phase == "settling":
            return [] if self._leases.open else self._move()
        if self._phase != "running":
            return []
        if transfer.is_close(self._done_step):
            return self._settle()
        return self._stop_receiving_state() if transfer.will_not_converge(self._done_step) else []

    def _stop_receiving_state(self) -> Out:
        """Who follows will never be near: the state that it needs is brought while all wait."""
        stopped = self._stop_sending_state()
        if not stopped or self._phase not in ("running", "settling"):
            return stopped
        return stopped + self._settle()

    def _stop_sending_state(self) -> Out:
        transfer, self._transfer = self._transfer, None
        return [] if transfer is None else [*transfer.ends()]

    def _settle(self) -> Out:
        """Finish what is leased."""
        self._phase = "settling"
        return [] if self._leases.open else self._move()

    def _on_no_plan(self, reason: str) -> Out:
        if self._phase == "planning":
            if self._suspects.devices & self.members.available - self._planned_for:
                return self._make_plan(of_all=True)
            self._without_plan = self._planned_for
            if self._recalls.queued:
                self._recalls.too_few()
            if self._recalls.awaited or self._recalls.queued or self.members.available > self._planned_for:
                self._phase = "recalling"
                return self._begin_anew()
            return self._end("lost", f"{self._reason}; no plan for what is left: {reason}" if self._reason else reason)
        self.members.stay()
        return []

    def _move(self) -> Out:
        """All leased work is done, and all devices have the state of the same step; joining devices soon will."""
        if self._leases.exhausted:
            return self._end(self._ending)
        transfer = self._transfer
        return self._hold() if transfer is None or transfer.reached() == self._leases.last_step else []

    def _on_lost(self, lost: DeviceLost) -> Out:
        device, reason, gone = lost.device, lost.reason, {lost.device, *lost.worker_ids}
        if not self.survives:
            return self._end("lost", f"device {device!r} was lost: {reason}")
        self._recalls.lost(device, reason, returns=lost.returns)
        concerns = bool(gone & (self.members.here | self.awaited)) or self._phase == "recalling"
        for name in gone:
            self.members.gone(name)
        self._plan_without(gone)
        fences: Out = [Disconnect(name) for name in sorted(gone)]
        if not concerns:
            return fences
        at_work = self._phase in ("running", "settling", "closing")
        if at_work and gone.isdisjoint(self.devices):
            if self._next is not None:
                return fences
            asked_meanwhile = self._transfer is not None  # and told to come back when the change of plan is over
            out: Out = [*fences, *self._stop_sending_state()]
            if self._phase == "settling":
                return out if self._leases.open else out + self._move()
            return out + self._reconsider() if asked_meanwhile else out
        self._reason = f"device {device!r} was lost: {reason}"
        if self._phase == "joining" and not self._began and not gone.isdisjoint(self.devices):
            self._began = True  # it never came: go on with those who did
        if self._attempts.lost(device):
            return self._end("lost", f"{self._reason}; {self._attempts.fruitless} attempts to go on did no step")
        return [*fences, *self._hold()]

    def _on_step_failed(self, device: str, failure: StepFailure) -> Out:
        if self._phase not in ("placing", "running", "settling", "closing"):
            return []
        before = self._suspects.failed(device, failure)
        if not self.survives or before or self._attempts.lost(device):
            return self._end("failed", failure.described(device, before))
        self._reason = f"device {device!r}: {failure.reason}"
        return self._hold()

    def _plan_without(self, gone: Collection[str]) -> None:
        """A plan that was made for these devices too comes to nothing."""
        if self._next is not None and not self._next.parts.keys().isdisjoint(gone):
            self._next = None

    def _hold(self) -> Out:
        self._epoch += 1
        self._phase, self._restarted, self._transfer = "holding", False, None
        self._reports.clear()
        self.members.asked()
        return [Order(d, Pause(epoch=self._epoch)) for d in sorted(self.members.here)] or self._on_held()

    def _on_held(self) -> Out:
        if self._phase != "holding" or self.members.silent:
            return []
        planned, self._next = self._next, None
        if planned is not None and self.members.available >= planned.parts.keys():
            return self._adopt(planned)
        if not self.members.here:
            self._phase = "recalling"
            return self._begin_anew()
        return self._make_plan()

    def _make_plan(self, *, of_all: bool = False) -> Out:
        here = self.members.available
        self._phase, self._planned_for = "planning", here if of_all else self._suspects.trusted(here)
        return [MakePlan(tuple(sorted(self._planned_for)), waits=True)]

    def _begin_anew(self) -> Out:
        """Once everybody is back who can come back soon, where too few are left."""
        if self._recalls.awaited:
            return []
        if self._recalls.queued and self.members.available <= self._without_plan:
            return self._end("interrupted") if self._ending == "interrupted" else []
        if not self.members.available:
            return self._end("lost", f"{self._reason}; no other device is left")
        step = max(self._saved, self._leases.acknowledged) if self.members.here else self._saved
        if not self._recalls.again(step):
            return self._end("lost", f"{self._reason}; {self._recalls.vain(step)}")
        return [self._recalls.recall(self.members.available), *self._make_plan()]

    def _adopt(self, layout: StateLayout) -> Out:
        self.layout, self.devices = layout, tuple(layout.parts)
        self._phase, self._without_plan = "joining", frozenset()
        self._recalls.planned()
        missing = self.members.missing(self.devices)
        return [CallDevice(d) for d in missing] if missing else self._restore()

    def _end(self, outcome: Ending, reason: str = "") -> Out:
        if self._phase == "done":
            return []
        self._phase = "done"
        return [Halt(epoch=self._epoch), FinishRun(outcome, reason)]
