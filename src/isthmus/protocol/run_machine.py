"""The coordinator's side of a run: the `Coordinator`, and everything that a host would otherwise have to decide.

    who is lost (session/session.py), offers, who leaves ─┬─► coordinator ─► its port
    spans of steps, probes of links ─► adaptation ────────┘

It has no phases of its own: those are the coordinator's. The runtime's host and the simulator's drive the same machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from isthmus.errors import PeerError
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.interruptions import Interruptions, Recovery
from isthmus.protocol.recovery import StateHolding, StateLayout
from isthmus.protocol.report_checks import ReportChecks
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceOrder,
    DeviceReport,
    Halt,
    ItemReported,
    OpenItem,
    Pause,
    RetireSnapshots,
)
from isthmus.protocol.run_ports import EpochStart, FinishRun, PlanRequest, RunPort
from isthmus.protocol.work import Item
from isthmus.session.failures import Loss
from isthmus.session.program import JOINING, OutOfPhase
from isthmus.session.session import Observation, Session
from isthmus.trace import Span


class RunMachine(Session):
    """It is the port of the coordinator. Its host sets `port`; the run ends by `finish_run`."""

    port: RunPort

    def __init__(
        self, coordinator: Coordinator, *, timeout_s: float, start_s: float = 0.0, adaptation: Adaptation | None = None
    ) -> None:
        """`timeout_s`: for a message; `start_s`: for a process to come. Without `adaptation` the figures of the fleet
        stay as they are."""
        super().__init__(self._note, timeout_s=timeout_s, start_s=start_s)
        self.coordinator = coordinator
        coordinator.port = self
        self._adaptation = adaptation
        self._checks = ReportChecks(coordinator.spec, coordinator.epoch, coordinator.leases.last_step)
        self._interruptions = Interruptions(self._note)
        self._offered: frozenset[str] = frozenset()
        self._leaving: set[str] = set()
        self._queued: frozenset[str] = frozenset()
        self._due: dict[str, int] = dict.fromkeys(coordinator.devices, 0)
        """The item that each worker reports next."""
        self._verdict = ""
        """On the device that was lost last."""
        self._short = False
        """Whether memory was short on a device since the last step."""
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    @property
    def expected(self) -> Collection[str]:
        return self.coordinator.awaited if self.coordinator.phase == JOINING else ()

    @property
    def concerned(self) -> Collection[str]:
        machine = self.coordinator
        return {*map(device_of, self.connected), *machine.devices, *machine.awaited, *machine.queued}

    @property
    def epoch(self) -> int:
        return self.coordinator.epoch

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return tuple(self._interruptions.recoveries)

    # What the host says

    def joined(self, device: str, holdings: Sequence[StateHolding]) -> None:
        """A worker is connected, and holds these states of the run in memory."""
        if self.over:
            return
        try:
            self._checks.check_held(holdings)
        except PeerError as e:
            self.disbelieve(device, e)
        else:
            self.connected.add(device)
            self.coordinator.joined(device, holdings)

    def heard(self, device: str, body: DeviceReport) -> None:
        """A worker reports. One that says what none of this run can, or not now, is lost to the run."""
        if self.over:
            return
        current = body.epoch == self.epoch
        try:
            if current:
                self._checks.check(body, len(self.coordinator.devices))
        except PeerError as e:
            self.disbelieve(device, e)
            return
        if isinstance(body, DeviceFailed):
            self._on_failed(device, body)
        elif isinstance(body, ItemReported) and current:
            self._on_reported(device, body)
        else:
            self._pass_on(device, body)

    def stop(self) -> None:
        """The user wants to stop: finish what is leased, save, leave."""
        if not self.over:
            self.coordinator.stop()

    def planned(self, request: PlanRequest, layout: StateLayout, figures: PlanFigures | None) -> None:
        """The plan that was asked for. By its figures a run that need not change its plan decides."""
        if self.over:
            return
        worth_it = request.must
        if self._adaptation is not None and figures is not None and request.epoch == self.epoch:
            worth_it = self._adaptation.made(layout.number, figures, must=worth_it)
        self.coordinator.planned(request.epoch, layout, worth_it=worth_it)

    def no_plan(self, request: PlanRequest, reason: str) -> None:
        """There is none for the devices that were asked about."""
        if self.over:
            return
        if request.epoch == self.epoch and self._adaptation is not None:
            self._adaptation.made(-1, None, must=False)
        leaving = self._leaving_devices()
        self.coordinator.no_plan(request.epoch, reason)
        self._note_leaving(leaving, reason)

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
            self.coordinator.queued_by_engine(seen.queued)
        if self.lose():
            return
        if self._adaptation is not None and self.coordinator.phase == "running":
            link = self._adaptation.to_probe(self.now_s)
            if link is not None:
                self.port.probe_link(*link)
        offers = seen.offers - self.connected
        fresh, self._offered = offers - self._offered, offers
        for device in sorted(fresh):
            self.coordinator.offered(device)
        leaving, self._leaving = self._leaving, set()
        for worker_id in sorted(self.connected):
            if device_of(worker_id) in leaving:
                self.coordinator.leaving(worker_id)

    # Who is lost

    def missed(self) -> Iterator[tuple[str, str]]:
        machine, phase = self.coordinator, self.coordinator.phase
        awaited = {device_of(worker_id) for worker_id in machine.awaited}
        self._deadlines.in_queue(machine.queued if not awaited else (), self.now_s)
        yield from self._deadlines.missed(phase, awaited, self.now_s, self.seen.starting.__contains__)
        for device in sorted(machine.awaited) if phase == "recalling" else ():
            if device not in self.seen.returning:
                yield device, "it has left"
        self._deadlines.lag(*machine.behind, self.now_s)

    def lost(self, loss: Loss) -> None:
        device, self._verdict = loss.device, str(loss.failure)
        if loss.cause == "job":  # the job's fault: every other device would say the same
            self._over = True
            self.port.halt(Halt(epoch=self.epoch))
            self.port.finish_run(FinishRun("failed", self._verdict))
            return
        known = {*self.connected, *self.coordinator.devices, *self.coordinator.awaited} - {device}
        further = tuple(worker_id for worker_id in sorted(known) if device_of(worker_id) == device)
        for name in (device, *further):
            self.port.reject_device(name, self._verdict, permanent=loss.permanent)
        # It is not waited for twice.
        returns = device in self.seen.returning and not loss.permanent and self.coordinator.phase != "recalling"
        self.coordinator.lost(device, loss.reason, workers=further, returns=returns)

    def _pass_on(self, device: str, body: DeviceReport) -> None:
        try:
            self.coordinator.heard(device, body)
        except OutOfPhase as e:
            self.disbelieve(device, e)

    # What devices report

    def _on_failed(self, device: str, failed: DeviceFailed) -> None:
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
            self.coordinator.heard(device, failed)

    def _on_reported(self, device: str, report: ItemReported) -> None:
        due = self._due.get(device)
        if report.item != due or report.item not in self.coordinator.leases.open:
            self.disbelieve(device, f"reported item {report.item}, not {due}")
            return
        self._due[device] = report.item + 1
        self.port.accept_report(device, report.item)
        self._pass_on(device, report)

    # Lines for people, and what is believed

    def _leaving_devices(self) -> frozenset[str]:
        """Who is here and was asked to leave."""
        members = self.coordinator.members
        return frozenset(map(device_of, members.leaving(members.here)))

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
        for device in sorted(asked) if self._over else ():
            self._note(f"{device} was asked to leave: the plan that could not be made was one without it")

    def _believe(self, adaptation: Adaptation, notes: Iterable[str]) -> None:
        """Figures were measured: another plan may be better."""
        for text in notes:
            self._note(text)
        if adaptation.asks(self.now_s):
            self.coordinator.fleet_changed()

    def _note(self, text: str) -> None:
        self.port.note(text)

    # What the coordinator asks

    def begin_epoch(self, start: EpochStart) -> None:
        self._due = dict.fromkeys(self.coordinator.devices, start.first_item)
        self._checks.began(start)
        self.port.begin_epoch(start)
        self._interruptions.epoch_began(start)
        if self._adaptation is not None:
            self._adaptation.began(self.coordinator.layout.number, start.step, self.now_s)

    def assign_stage(self, device: str) -> None:
        self.port.assign_stage(device)

    def order(self, device: str, body: DeviceOrder) -> None:
        if isinstance(body, Pause):
            self._interrupt()
        self._checks.ordered(body)
        self.port.order(device, body)

    def open_item(self, order: OpenItem) -> None:
        self._checks.opened(order.item)
        if self._interruptions.end(self.now_s):
            self._verdict = ""
        self.port.open_item(order)

    def retire_snapshots(self, order: RetireSnapshots) -> None:
        self.port.retire_snapshots(order)

    def halt(self, order: Halt) -> None:
        self.port.halt(order)

    def item_done(self, item: Item, loss: float | None, note: str, sums: tuple[float, ...]) -> None:
        if item.kind == "train":
            self._interruptions.step_done(item.step + 1)
            self._short = False
        self.port.item_done(item, loss, note, sums)

    def commit_checkpoint(self, item: Item, *, finite: bool) -> None:
        self.port.commit_checkpoint(item, finite=finite)

    def disconnect(self, device: str) -> None:
        self.forget(device)
        self.port.disconnect(device)

    def release_device(self, device: str) -> None:
        self.forget(device)
        self.port.release_device(device)

    def _interrupt(self) -> None:
        self._interruptions.begin(self._verdict or self._asked_to_leave(), self.now_s)

    def forget(self, worker: str) -> None:
        super().forget(worker)
        self._offered -= {worker}

    def make_plan(self, request: PlanRequest) -> None:
        if request.waits:
            self._interrupt()
        believed = self._adaptation.believed if self._adaptation is not None else None
        self.port.make_plan(msgspec.structs.replace(request, believed=believed))

    def call_device(self, device: str) -> None:
        self.port.call_device(device)

    def restart_run(self, devices: tuple[str, ...], count: int, most: int, reasons: str) -> None:
        self.port.restart_run(devices, count, most, reasons)

    def receive_state(self, device: str, number: int, step: int, donated: Mapping[str, frozenset[str]]) -> None:
        self.port.receive_state(device, number, step, donated)

    def finish_run(self, finish: FinishRun) -> None:
        self._over = True
        reason = finish.reason
        if finish.outcome == "lost" and not self.coordinator.survives:
            reason = self._verdict
        self.port.finish_run(msgspec.structs.replace(finish, reason=reason, short_of_memory=self._short))
