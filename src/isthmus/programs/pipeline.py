"""The program of a pipeline: the life of a training run over the stages of one plan after another.

    joining ──all joined──► placing ──all ready──► running ──last item reported──► over
       ▲                                            │   └─interrupted─► closing ──saved──► over
       │                                            ├─ a better plan ─► settling ─┐
       └── planning ◄──all said what they hold── holding ◄── a device is lost ────┘

It leases items ahead of the slowest device, so that no device waits for it, and commits a checkpoint once every
device has reported its part.

A lost device is fenced: a new plan epoch begins, and messages of older epochs are dropped. The remaining devices stop,
report what they hold (`recovery`), get a new plan, and go on from the latest step whose state is whole, in memory or
in the last checkpoint. The program says which device gives
which parts to whom; the state goes from device to device. A change to a better plan, for a device that leaves or for
one that came, goes the same way, but all devices finish their leased items first: then nothing is lost. A joining
device gets its state before that, while the others train (`state_transfer`). Where no device is left, or too few for
any plan, the coordinator waits for lost devices whose machines are there (`recalling`), without a time limit for those
in the queue of a cluster's engine.

Spans of steps and probes of links say what the fleet can do (`adaptation`): by these figures the coordinator asks for
a better plan. The runtime's host and the simulator's are the two ports of the same program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from isthmus.plans.plan import device_of
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.finite import Divergence
from isthmus.protocol.leases import ItemReports, Leases, ReportChecks, Reports, evaluation_sums, mean_loss, non_finite
from isthmus.protocol.members import MOST_RECALLS, Interruptions, Members, Recovery, Restarts, StateTransfer
from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout, StateSources, recovery_point
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReady,
    DeviceReport,
    GiveState,
    Halt,
    Inventory,
    Item,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    RunSpec,
    SnapshotCopied,
    StateMissing,
    StateReceived,
    TakeState,
    TransferEnded,
)
from isthmus.protocol.run_ports import Ending, EpochStart, FinishRun, PipelinePort, PlanRequest
from isthmus.protocol.step_failures import Attempts, Suspects
from isthmus.session.program import JOINING, OVER, OutOfPhase, Policy, report
from isthmus.session.session import Loss, Observation, Session
from isthmus.trace import Span

AT_WORK = ("running", "settling", "closing")  # phases in which devices have items


class PipelineStatistics(NamedTuple):
    phase: str
    finished: int  # items that every device has reported
    leased: int
    stale: int
    epoch: int
    recovery_point: int  # the run goes on from this step at least, if any one device is lost now


class Pipeline(Policy[PipelinePort], Session):
    """The coordinator's side of a run. Its host sets `port`; the run ends by `finish_run`."""

    def __init__(
        self,
        devices: Iterable[str],
        spec: RunSpec,
        *,
        timeout_s: float,
        start_s: float = 0.0,
        layout: StateLayout | None = None,
        lineage: Lineage | None = None,
        adaptation: Adaptation | None = None,
    ) -> None:
        """Times: as `Session`. Without a layout the run ends when a device is lost. `lineage` is of a run whose
        coordinator was started again, in a new epoch: `spec` begins from its last checkpoint, and devices may hold
        more. Without `adaptation` the figures of the fleet stay as they are."""
        Policy.__init__(self, JOINING)
        Session.__init__(self, self._note, timeout_s=timeout_s, start_s=start_s)
        self.epoch = lineage.next_epoch if lineage is not None else 0
        self.devices = tuple(devices)
        self.spec = spec
        self.layout = layout or StateLayout(parts={})
        self.survives = layout is not None  # whether the run goes on when a device is lost
        self._lineage = lineage or Lineage()
        self.leases = Leases(spec, self.layout)  # items that devices may be at work on
        self._step = self._saved = self._done_step = spec.start_step
        self._began = self._restarted = lineage is not None
        """Whether there may be more than the checkpoint to go on from; whether devices may be at work for an epoch
        before."""
        self.members = Members()
        self._next: StateLayout | None = None
        self._transfer: StateTransfer | None = None
        """The state transfer that prepares joining devices for the next plan."""
        self._transfers = 0
        self._awaited: set[str] = set()  # who is to be ready
        self.sources = StateSources(self.layout, {})  # who gives what in this epoch
        self._reports = ItemReports()
        self._due: dict[str, int] = dict.fromkeys(self.devices, 0)  # the item that each worker reports next
        self._divergence = Divergence(spec.non_finite_steps)
        self._attempts = Attempts(spec.recovery_attempts)
        self._suspects = Suspects()
        self._recalls = Restarts()
        self._planned_for: frozenset[str] = frozenset()
        self._without_plan: frozenset[str] = frozenset()  # there is no plan for these devices
        self._ending: Literal["done", "interrupted"] = "done"
        self._reason = ""
        self._verdict = ""  # on the device that was lost last
        self._short = False  # whether memory was short on a device since the last step
        self._offered: frozenset[str] = frozenset()
        self._leaving: set[str] = set()
        self._queued: frozenset[str] = frozenset()
        self._adaptation = adaptation
        self._checks = ReportChecks(spec, self.epoch, self.leases.last_step)
        self._interruptions = Interruptions(self._note)

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return tuple(self._interruptions.recoveries)

    @property
    def expected(self) -> Collection[str]:
        return self.awaited if self.phase == JOINING else ()

    @property
    def concerned(self) -> Collection[str]:
        return {*map(device_of, self.connected), *self.devices, *self.awaited, *self.queued}

    @property
    def awaited(self) -> frozenset[str]:
        """The devices that it waits for before it goes on."""
        if self.phase == "joining":
            return frozenset(self.members.missing(self.devices))
        if self.phase == "holding":
            return self.members.silent
        if self.phase == "recalling":
            return self._recalls.awaited
        if self.phase == "settling" and self._transfer is not None and not self.leases.open:
            return self._transfer.waited_for
        return frozenset(self._awaited) if self.phase == "placing" else frozenset()

    @property
    def queued(self) -> frozenset[str]:
        """The devices without which there is no plan, that come whenever their engine starts them."""
        return self._recalls.queued if self.phase == "recalling" else frozenset()

    @property
    def behind(self) -> tuple[int, frozenset[str]]:
        """The oldest item that is not done by all, and who has not reported it while others have."""
        oldest = min(self.leases.open, default=-1)
        return oldest, self._reports.missing(oldest, self.devices)

    def statistics(self) -> PipelineStatistics:
        leases = self.leases
        point = max(self._saved, leases.acknowledged)
        return PipelineStatistics(self.phase, leases.finished, leases.leased, self.stale, self.epoch, point)

    def is_late(self, device: str, body: DeviceReport) -> bool:
        return body.epoch != self.epoch

    # What the host says

    def joined(self, device: str, holdings: Sequence[StateHolding] = ()) -> None:
        """A worker is connected, and holds these states of the run in memory."""
        if self.over:
            return
        try:
            self._checks.check_held(holdings)
        except OutOfPhase as e:
            self.disbelieve(device, e)
            return
        self.connected.add(device)
        self.members.joined(device, holdings)
        self._recalls.at_work(device)
        called = self._next is not None and device in self._next.parts
        if self.phase == JOINING:
            self._restore()
        elif self.phase == "recalling":
            self._begin_anew()
        elif self.phase == "holding":
            self._go_on()
        elif self.phase == "running" and called and self._next is not None:  # the work went on while it started
            if not self.members.missing(self._next.parts):
                self._bring()
        else:
            self._reconsider()

    def heard(self, device: str, body: msgspec.Struct) -> None:
        """A worker reports. One that says what none of this run can, or not now, is lost to the run."""
        assert isinstance(body, DeviceReport), "a host passes on reports alone"
        if self.over:
            return
        current = body.epoch == self.epoch
        try:
            if current:
                self._checks.check(body, len(self.devices))
            if isinstance(body, DeviceFailed):
                self._accuse(device, body)
                return
            if isinstance(body, ItemReported) and current:
                self._accept(device, body)
            super().heard(device, body)
        except OutOfPhase as e:
            self.disbelieve(device, e)

    def measured(self, step: int, spans: tuple[Span, ...]) -> None:
        """All devices have done a step, and reported these spans since the one before."""
        if not self.over and self._adaptation is not None:
            self._believe(self._adaptation, self._adaptation.measured(step, spans))

    def probed(self, source: str, target: str, bandwidth_bytes_per_s: float | None) -> None:
        """A link was measured; None where nobody could say."""
        if not self.over and self._adaptation is not None:
            found = self._adaptation.probed((source, target), bandwidth_bytes_per_s, self.now_s)
            self._believe(self._adaptation, found)

    def looked(self, seen: Observation) -> None:
        if self.over:
            return
        self.seen = seen
        self._leaving |= seen.leaving
        if seen.queued != self._queued:
            self._queued = seen.queued
            self.queued_by_engine(seen.queued)
        if self.lose():
            return
        if self._adaptation is not None and self.phase == "running":
            link = self._adaptation.to_probe(self.now_s)
            if link is not None:
                self.port.probe_link(*link)
        offers = seen.offers - self.connected
        fresh, self._offered = offers - self._offered, offers
        for device in sorted(fresh):
            self.offered(device)
        leaving, self._leaving = self._leaving, set()
        for worker_id in sorted(self.connected):
            if device_of(worker_id) in leaving:
                self.leaving(worker_id)

    def offered(self, device: str) -> None:
        """The device could work, if a plan wants it."""
        if self.over:
            return
        self.members.offered(device)
        self._recalls.back(device)
        if self.phase == "recalling":
            self._begin_anew()
        elif self.phase == JOINING and device in self.awaited:
            self.port.call_device(device)  # it is here, and does not know that it is awaited
        else:
            self._reconsider()

    def leaving(self, device: str) -> None:
        """The device is to leave without loss."""
        if not self.over:
            self.members.leaves(device)
            self._reconsider(must=True)

    def queued_by_engine(self, devices: frozenset[str]) -> None:
        """These devices wait for a node in the queue of their engine, and no others: they come back, nobody knows
        when."""
        if self.over:
            return
        self._recalls.wait_in_queue(devices)
        if self.phase == "recalling":
            self._begin_anew()

    def fleet_changed(self) -> None:
        """Devices or links are not as the plan assumed."""
        self._reconsider()

    def stop(self) -> None:
        """The user wants to stop: finish what is leased, save, leave."""
        begins = self.phase in (JOINING, "placing") and not self._began
        waits = self.phase == "recalling" and not (self.members.here and self._recalls.awaited)
        if begins or waits:
            self._end("interrupted")
        elif not (self.over or self.phase == "closing" or self.leases.over):  # its last item may be leased already
            self._ending = "interrupted"
            if self.phase in ("running", "settling"):
                self._close()

    def planned(self, request: PlanRequest, layout: StateLayout, figures: PlanFigures | None = None) -> None:
        """The plan that was asked for. By its figures a run that need not change its plan decides."""
        if self.over:
            return
        worth_it = request.must
        if self._adaptation is not None and figures is not None and request.epoch == self.epoch:
            worth_it = self._adaptation.made(layout.number, figures, must=worth_it)
        if self._is_answer(request.epoch):
            if self.phase == "planning":
                self._adopt(layout)
            elif self.phase == "running" and worth_it:
                self._stop_sending_state()
                self._next = layout
                if not self._call(layout):
                    self._bring()

    def no_plan(self, request: PlanRequest, reason: str) -> None:
        """There is none for the devices that were asked about."""
        if self.over:
            return
        if request.epoch == self.epoch and self._adaptation is not None:
            self._adaptation.made(-1, None, must=False)
        if self._is_answer(request.epoch):
            leaving = self._leaving_devices()
            self._do_without_plan(reason)
            self._note_leaving(leaving, reason)

    def _do_without_plan(self, reason: str) -> None:
        if self.phase != "planning":
            self.members.stay()
            return
        if self._suspects.devices & self.members.available - self._planned_for:
            self._make_plan(of_all=True)
            return
        self._without_plan = self._planned_for
        if self._recalls.queued:
            self._recalls.too_few()
        if self._recalls.awaited or self._recalls.queued or self.members.available > self._planned_for:
            self.phase = "recalling"
            self._begin_anew()
        else:
            self._end("lost", f"{self._reason}; no plan for what is left: {reason}" if self._reason else reason)

    def _is_answer(self, epoch: int) -> bool:
        """Return whether a plan is of use that was asked for in this epoch. OutOfPhase where nobody can have asked."""
        self.stale += epoch != self.epoch
        if epoch == self.epoch and self.phase == "holding":
            raise OutOfPhase("a plan came in phase 'holding'")
        return epoch == self.epoch

    # Who is lost

    def missed(self) -> Iterator[tuple[str, str]]:
        awaited = {device_of(worker_id) for worker_id in self.awaited}
        self._deadlines.in_queue(self.queued if not awaited else (), self.now_s)
        yield from self._deadlines.missed(self.phase, awaited, self.now_s, self.seen.starting.__contains__)
        for device in sorted(self.awaited) if self.phase == "recalling" else ():
            if device not in self.seen.returning:
                yield device, "it has left"
        oldest, behind = self.behind
        saves = oldest in self.leases.open and self.leases.open[oldest].kind == "save"
        what = ("to save their parts of the checkpoint",) if saves else ()
        self._deadlines.lag(oldest, behind, self.now_s, *what)

    def lost(self, loss: Loss) -> None:
        if self.over:
            return
        device, self._verdict = loss.device, str(loss.failure)
        if loss.cause == "job":  # every other device would say the same
            self._short = False
            self._end("failed", self._verdict)
            return
        known = {*self.connected, *self.devices, *self.awaited} - {device}
        workers = [worker_id for worker_id in sorted(known) if device_of(worker_id) == device]
        for name in (device, *workers):
            self.port.reject_device(name, self._verdict, permanent=loss.permanent)
        if not self.survives:
            self._end("lost", self._verdict)
            return
        # It is not waited for twice.
        returns = device in self.seen.returning and not loss.permanent and self.phase != "recalling"
        self._recalls.lost(device, loss.reason, returns=returns)
        gone = {device, *workers}
        concerns = bool(gone & (self.members.here | self.awaited)) or self.phase == "recalling"
        for name in gone:
            self.members.gone(name)
        self._plan_without(gone)
        if not concerns:
            self._fence(gone)
        elif self.phase in AT_WORK and gone.isdisjoint(self.devices):
            self._do_without(gone)
        else:
            self._begin_again(device, f"device {device!r} was lost: {loss.reason}", gone)

    def forget(self, worker: str) -> None:
        super().forget(worker)
        self._offered -= {worker}

    def _accuse(self, device: str, failed: DeviceFailed) -> None:
        owner, current = device_of(device), failed.epoch == self.epoch
        if failed.failure is None or failed.fault == "other":
            if current or failed.fault != "other":
                self.failed(owner, failed.reason, failed.fault, starts_again=failed.starts_again)
        elif current:
            self._failures.cleared(owner)  # its neighbours accuse it now
            if failed.shortage is not None:
                self._short = True
                if self._adaptation is not None:
                    self._note(self._adaptation.short(device, failed.shortage))
            self._verdict = f"device {device!r}: {failed.failure.reason}"
            super().heard(device, failed)

    def _accept(self, device: str, report: ItemReported) -> None:
        """OutOfPhase for a report of another item than the one that is due."""
        due = self._due.get(device)
        if report.item != due or report.item not in self.leases.open:
            raise OutOfPhase(f"reported item {report.item}, not {due}")
        self._due[device] = report.item + 1
        self.port.accept_report(device, report.item)

    # Joining, placing

    def _restore(self) -> None:
        """Once all are here: choose the state to go on from, and who gives what the plan moved."""
        if self.members.missing(self.devices):
            return
        if self._restarted:
            self._next = self.layout
            self._hold()
            return
        held = self.members.holdings if self._began else {}
        point = recovery_point(self.layout, held, self._lineage, self._saved)
        self._step = point.step
        self.sources = StateSources(self.layout, point.own, self._seconds_per_byte)
        self._lineage.begin(self.epoch, self._step)
        self._done_step = self._step
        self._divergence.restart()
        self._attempts.began()
        self.leases.begin(self._step, self.layout, due=self._began or self.spec.eval_due)
        self.phase, self._awaited = "placing", set(self.devices)
        if self.survives:
            self._begin_epoch(EpochStart(self.epoch, self._step, self.leases.leased, not point.in_memory))
        for donor, receivers in sorted(self.sources.receivers().items()):
            self.port.order(donor, GiveState(step=self._step, receivers=receivers, epoch=self.epoch))
        none = frozenset[str]()
        for device in self.devices:
            own = point.own.get(device, none) & self.layout.parts.get(device, none)
            donors = dict(self.sources.donors.get(device, {}))
            self.port.assign_stage(device)
            self.port.order(device, PlaceWeights(own=own, donors=donors, epoch=self.epoch))

    def _seconds_per_byte(self, donor: str, receiver: str) -> float:
        source, target = device_of(donor), device_of(receiver)
        if source == target:
            return 0.0
        if self._adaptation is None:
            return 1.0
        return 1 / self._adaptation.believed.link(source, target).bandwidth_bytes_per_s

    @report(StateMissing, "placing")
    def _missing(self, device: str, missing: StateMissing) -> None:
        """Others give what a donor does not. Where nobody can, the link between the two counts as broken."""
        if not self.sources.gives(missing.donor, device, missing.parts):
            raise OutOfPhase(f"lacks parts that {missing.donor!r} was not to give it")
        donors = self.sources.instead(missing.donor, device, missing.parts)
        if donors is None:
            self.failed(device_of(device), missing.reason, "other")
            return
        self._note(f"{device} gets state from {', '.join(sorted(donors))} instead: {missing.reason}")
        for donor, parts in sorted(donors.items()):
            self.port.order(donor, GiveState(step=self._step, receivers={device: parts}, epoch=self.epoch))
        self.port.order(device, TakeState(donors=donors, epoch=self.epoch))

    def _begin_epoch(self, start: EpochStart) -> None:
        self._due = dict.fromkeys(self.devices, start.first_item)
        self._checks.began(start)
        self.port.begin_epoch(start)
        self._interruptions.epoch_began(start)
        if self._adaptation is not None:
            self._adaptation.began(self.layout.number, start.step, self.now_s)

    @report(DeviceReady, "placing")
    def _ready(self, device: str, ready: DeviceReady) -> None:
        self._awaited.discard(device)
        if self._awaited:
            return
        self.phase, self._began = "running", True
        if self._ending == "interrupted":
            self._close()
            return
        self._lease()
        if not self.leases.keeps:
            self._release()
        if self.members.leaving(self.devices):
            self._reconsider(must=True)
        elif self.members.available.difference(self.devices):
            self._reconsider()

    # Running

    @report(ItemReported, *AT_WORK)
    def _item_reported(self, device: str, reported: ItemReported) -> None:
        known = reported.item in self.leases.open  # of others nothing is kept
        if not known or (reports := self._reports.add(device, reported, self.devices)) is None:
            return
        item = self.leases.finish(reported.item)
        if item.kind == "train":
            self._interruptions.step_done(item.step + 1)
            self._short = False
        note, ends = non_finite(item, reports, self._divergence)
        if ends:
            self.port.item_done(item, mean_loss(reports), "", ())
            saved = f"the newest checkpoint is of step {self._saved}" if self._saved else "nothing was saved before"
            self._end("diverged", f"{note}; {saved}")
            return
        if item.kind == "train":
            self._done_step = item.step + 1
            self._attempts.stepped()
            self._suspects.stepped(item.step, set(self.devices))
        self.port.item_done(item, mean_loss(reports), note, evaluation_sums(item, reports))
        if item.kind == "save":
            self._commit(item, reports, finite=not note)
        elif item.kind == "keep":
            self._acknowledged(self.leases.kept(item.step))
        if self.phase == "running" or (self.phase == "settling" and not self.leases.at_period):
            self._lease()
        if not self.leases.open:
            if self.phase == "settling":
                self._move()
            else:
                self._end(self._ending)

    def _commit(self, item: Item, reports: Reports, *, finite: bool) -> None:
        """All parts of a checkpoint are written, as devices say."""
        doubtful = next(((device, report.doubt) for device, report in reports.items() if report.doubt), None)
        if doubtful is None:
            self._saved = item.step
            self.port.commit_checkpoint(item, finite=finite)
        else:
            self.port.give_up_checkpoint(item, *doubtful)
            for again in self.leases.lease_save_again(item):
                self._open(again)

    @report(SnapshotCopied, *AT_WORK)
    def _snapshot_copied(self, device: str, copied: SnapshotCopied) -> None:
        self._acknowledged(self.leases.snapshot_sources(copied.of, copied.step))

    def _acknowledged(self, step: int | None) -> None:
        """A snapshot may be complete now."""
        if step is not None:
            self.port.retire_snapshots(RetireSnapshots(step=step, epoch=self.epoch))
            self._release()

    def _release(self) -> None:
        gone = self.members.released(self.devices)
        self._plan_without(gone)
        for device in gone:
            self.forget(device)
            self.port.release_device(device)

    def _lease(self) -> None:
        for item in self.leases.lease():
            self._open(item)
        if not self.leases.open:
            self._end("done")

    def _open(self, item: Item) -> None:
        self._checks.opened(item)
        if self._interruptions.end(self.now_s):
            self._verdict = ""
        self.port.open_item(OpenItem(item=item, epoch=self.epoch))

    def _close(self) -> None:
        """Finish what is leased, save, leave."""
        self.phase = "closing"
        if not self.leases.closing and self.leases.last_step != self._saved:
            self._open(self.leases.lease_save())
        elif not self.leases.open:
            self._end("interrupted")

    # Another plan, or fewer devices

    def _reconsider(self, *, must: bool = False) -> None:
        """Ask whether another plan is better. Never in the middle of a change of plan: afterwards is soon enough."""
        if self.phase == "running" and self.survives and (self._transfer is None or must):
            devices = self._suspects.trusted(self.members.available)
            self._ask(PlanRequest(tuple(sorted(devices)), must, epoch=self.epoch))

    def _bring(self) -> None:
        """Whom the better plan needs is here: bring joining devices near to the others' state, then finish what is
        leased."""
        assert self._next is not None, "there is a better plan"
        if self._transfer is not None:
            return
        needs = {d: parts for d, parts in self._next.parts.items() if parts and d not in self.devices}
        if not needs or not self.layout.repeats:
            self._settle()
            return
        holds = {d: self.layout.parts.get(d, frozenset[str]()) for d in self.devices}
        self._transfers += 1
        self._transfer = StateTransfer(self._transfers, self.leases.last_step, needs, holds, self.epoch)
        self._checks.transfers(self._transfers, self.leases.last_step)
        self._transfer.begin(self.port)

    @report(StateReceived, *AT_WORK)
    def _state_received(self, device: str, received: StateReceived) -> None:
        transfer = self._transfer
        if transfer is None or received.number != transfer.number:
            return
        if received.step > self.leases.last_step:  # which nobody can have: the donor lies, or the device
            self.port.receive_state(device, transfer.number, transfer.step, {})
            self._stop_receiving_state()
            return
        transfer.state_received(device, received.of, received.step)
        if self.phase == "settling":
            if not self.leases.open:
                self._move()
        elif self.phase == "running":
            if transfer.is_close(self._done_step):
                self._settle()
            elif transfer.will_not_converge(self._done_step):
                self._stop_receiving_state()

    @report(TransferEnded, *AT_WORK)
    def _transfer_ended(self, device: str, ended: TransferEnded) -> None:
        if self._transfer is not None and ended.number == self._transfer.number:
            self._stop_receiving_state()

    def _stop_receiving_state(self) -> None:
        """End a state transfer whose joiner will never be near: the state that it needs is brought while all wait."""
        self._stop_sending_state()
        if self.phase in ("running", "settling"):
            self._settle()

    def _stop_sending_state(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.end(self.port)

    def _settle(self) -> None:
        """Finish what is leased."""
        self.phase = "settling"
        if not self.leases.open:
            self._move()

    def _move(self) -> None:
        """All leased work is done, and all devices have the state of the same step; joining devices soon will."""
        if self.leases.exhausted:
            self._end(self._ending)
        elif self._transfer is None or self._transfer.reached() == self.leases.last_step:
            self._hold()

    def _fence(self, gone: Collection[str]) -> None:
        for name in sorted(gone):
            self.forget(name)
            self.port.disconnect(name)

    def _do_without(self, gone: Collection[str]) -> None:
        """Lost are devices that have no part in the work yet."""
        asked_meanwhile = self._transfer is not None  # and told to come back when the change of plan is over
        self._fence(gone)
        if self._next is not None:
            return
        self._stop_sending_state()
        if self.phase == "settling":
            if not self.leases.open:
                self._move()
        elif asked_meanwhile:
            self._reconsider()

    def _begin_again(self, device: str, reason: str, gone: Collection[str]) -> None:
        """The run cannot go on as it is without this device, nor those that are gone with it."""
        self._reason = reason
        if self.phase == JOINING and not self._began and not set(gone).isdisjoint(self.devices):
            self._began = True  # it never came: go on with those who did
        if self._attempts.lost(device):
            self._end("lost", f"{self._reason}; {self._attempts.fruitless} attempts to go on did no step")
            return
        self._fence(gone)
        self._hold()

    @report(DeviceFailed, JOINING, "placing", *AT_WORK, "holding", "planning", "recalling")
    def _failed(self, device: str, failed: DeviceFailed) -> None:
        failure = failed.failure
        if failure is None or self.phase not in ("placing", *AT_WORK):
            return
        before = self._suspects.failed(device, failure)
        if not self.survives or before or self._attempts.lost(device):
            self._end("failed", failure.described(device, before))
            return
        self._reason = f"device {device!r}: {failure.reason}"
        self._hold()

    def _plan_without(self, gone: Collection[str]) -> None:
        """A plan that was made for these devices too comes to nothing."""
        if self._next is not None and not self._next.parts.keys().isdisjoint(gone):
            self._next = None

    def _hold(self) -> None:
        self.epoch += 1
        self.phase, self._restarted, self._transfer = "holding", False, None
        self._reports.clear()
        self.members.asked()
        here = sorted(self.members.here)
        if here:
            self._interrupt()
        for device in here:
            self.port.order(device, Pause(epoch=self.epoch))
        if not here:
            self._go_on()

    @report(Inventory, "holding")
    def _holds(self, device: str, inventory: Inventory) -> None:
        self.members.holds(device, inventory.holdings)
        self._go_on()

    def _go_on(self) -> None:
        """Once all that are here have said what they hold."""
        if self.members.silent:
            return
        planned, self._next = self._next, None
        if planned is not None and self.members.available >= planned.parts.keys():
            self._adopt(planned)
        elif self.members.here:
            self._make_plan()
        else:
            self.phase = "recalling"
            self._begin_anew()

    def _make_plan(self, *, of_all: bool = False) -> None:
        here = self.members.available
        self.phase, self._planned_for = "planning", here if of_all else self._suspects.trusted(here)
        self._interrupt()
        self._ask(PlanRequest(tuple(sorted(self._planned_for)), waits=True, epoch=self.epoch))

    def _ask(self, request: PlanRequest) -> None:
        believed = self._adaptation.believed if self._adaptation is not None else None
        self.port.make_plan(msgspec.structs.replace(request, believed=believed))

    def _interrupt(self) -> None:
        self._interruptions.begin(self._verdict or self._asked_to_leave(), self.now_s)

    def _begin_anew(self) -> None:
        """Once everybody is back who can come back soon, where too few are left."""
        if self._recalls.awaited:
            return
        if self._recalls.queued and self.members.available <= self._without_plan:
            if self._ending == "interrupted":
                self._end("interrupted")
            return
        if not self.members.available:
            self._end("lost", f"{self._reason}; no other device is left")
            return
        step = max(self._saved, self.leases.acknowledged) if self.members.here else self._saved
        if not self._recalls.again(step):
            self._end("lost", f"{self._reason}; {self._recalls.vain(step)}")
            return
        devices = tuple(sorted(self.members.available))
        self.port.restart_run(devices, self._recalls.count, MOST_RECALLS, self._recalls.reasons)
        self._make_plan()

    def _adopt(self, layout: StateLayout) -> None:
        self.layout, self.devices = layout, tuple(layout.parts)
        self.phase, self._without_plan = JOINING, frozenset()
        self._recalls.planned()
        if not self._call(layout):
            self._restore()

    def _call(self, layout: StateLayout) -> bool:
        """Return whether any of a plan's devices is missing: those are called."""
        missing = self.members.missing(layout.parts)
        for device in missing:
            self.port.call_device(device)
        return bool(missing)

    def _end(self, outcome: Ending, reason: str = "") -> None:
        if self.over:
            return
        self.phase = OVER
        self.port.halt(Halt(epoch=self.epoch))
        self.port.finish_run(FinishRun(outcome, reason, short_of_memory=self._short))

    # Lines for people, and what is believed

    def _leaving_devices(self) -> frozenset[str]:
        """Return who is here and was asked to leave."""
        return frozenset(map(device_of, self.members.leaving(self.members.here)))

    def _asked_to_leave(self) -> str:
        """A cause of a change of plan; empty where nobody was."""
        leaving = sorted(self._leaving_devices())
        return f"{', '.join(leaving)} {'was' if len(leaving) == 1 else 'were'} asked to leave" if leaving else ""

    def _note_leaving(self, asked: frozenset[str], reason: str) -> None:
        """After a plan could not be made: those that were asked to leave are not in it, and may have to stay."""
        for device in sorted(asked - self._leaving_devices()):
            self._note(
                f"{device} was asked to leave and stays: no plan could be made without it: {reason}; "
                "ask again to try again"
            )
        for device in sorted(asked) if self.over else ():
            self._note(f"{device} was asked to leave: the plan that could not be made was one without it")

    def _believe(self, adaptation: Adaptation, notes: Iterable[str]) -> None:
        """Figures were measured: another plan may be better."""
        for text in notes:
            self._note(text)
        if adaptation.asks(self.now_s):
            self.fleet_changed()

    def _note(self, text: str) -> None:
        self.port.note(text)
