"""The coordinator's side of a run: the `Coordinator`, and everything that a host would otherwise have to decide.

    connections closed, failures, accusations ─► failure detector ─┐
    ticks: processes that ended, offers, who leaves, time limits ──┼─► coordinator ─► its port
    spans of steps, probes of links ─► adaptation ─────────────────┘

It has no phases of its own: those are the coordinator's. Pure: the host says what time it is with each call. The
runtime's host and the simulator's drive the same machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.deadlines import Deadlines
from isthmus.protocol.failures import CLOSED, FailureDetector, without_name
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
from isthmus.protocol.run_ports import EpochStart, FinishRun, Observation, PlanRequest, RunPort
from isthmus.protocol.work import Item
from isthmus.session.program import OutOfPhase
from isthmus.trace import Span

TICK_S = 0.25
"""How often a host looks at its devices."""


class RunMachine:
    """It is the port of the coordinator. Its host sets `port`; the run ends by `finish_run`."""

    port: RunPort

    def __init__(
        self, coordinator: Coordinator, *, timeout_s: float, start_s: float = 0.0, adaptation: Adaptation | None = None
    ) -> None:
        """`timeout_s`: for a message; `start_s`: for a process to come. Without `adaptation` the figures of the fleet
        stay as they are."""
        self.coordinator = coordinator
        coordinator.port = self
        self._adaptation = adaptation
        self._checks = ReportChecks(coordinator.spec, coordinator.epoch, coordinator.leases.last_step)
        self._failures = FailureDetector()
        self._deadlines = Deadlines(timeout_s, start_s, self._note)
        self._interruptions = Interruptions(self._note)
        self._connected: set[str] = set()
        self._offered: frozenset[str] = frozenset()
        self._leaving: set[str] = set()
        self._queued: frozenset[str] = frozenset()
        self._due: dict[str, int] = dict.fromkeys(coordinator.devices, 0)
        """The item that each worker reports next."""
        self._verdict = ""
        """On the device that was lost last."""
        self._short = False
        """Whether memory was short on a device since the last step."""
        self._tick = Observation()
        self._now_s = 0.0
        self._over = False

    @property
    def epoch(self) -> int:
        return self.coordinator.epoch

    @property
    def urgent(self) -> bool:
        """Whether the next tick is to come at once."""
        return self._failures.certain

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return tuple(self._interruptions.recoveries)

    # What the host says: each at this time, in seconds of whatever clock

    def joined(self, device: str, holdings: Sequence[StateHolding], now_s: float) -> None:
        """A worker is connected, and holds these states of the run in memory."""
        if self._is_over(now_s):
            return
        try:
            self._checks.check_held(holdings)
        except PeerError as e:
            self._disbelieve(device, e)
        else:
            self._connected.add(device)
            self.coordinator.joined(device, holdings)

    def heard(self, device: str, body: DeviceReport, now_s: float) -> None:
        """A worker reports. One that says what none of this run can, or not now, is lost to the run."""
        if self._is_over(now_s):
            return
        current = body.epoch == self.epoch
        try:
            if current:
                self._checks.check(body, len(self.coordinator.devices))
        except PeerError as e:
            self._disbelieve(device, e)
            return
        if isinstance(body, DeviceFailed):
            self._on_failed(device, body)
        elif isinstance(body, ItemReported) and current:
            self._on_reported(device, body)
        else:
            self._pass_on(device, body)

    def disconnected(self, device: str, now_s: float, reason: str = CLOSED) -> None:
        """A device's connection closed, or it was silent for too long."""
        if not self._is_over(now_s):
            self._failures.disconnected(device_of(device), reason)

    def stop(self, now_s: float) -> None:
        """The user wants to stop: finish what is leased, save, leave."""
        if not self._is_over(now_s):
            self.coordinator.stop()

    def planned(self, request: PlanRequest, layout: StateLayout, figures: PlanFigures | None, now_s: float) -> None:
        """The plan that was asked for. By its figures a run that need not change its plan decides."""
        if self._is_over(now_s):
            return
        worth_it = request.must
        if self._adaptation is not None and figures is not None and request.epoch == self.epoch:
            worth_it = self._adaptation.made(layout.number, figures, must=worth_it)
        self.coordinator.planned(request.epoch, layout, worth_it=worth_it)

    def no_plan(self, request: PlanRequest, reason: str, now_s: float) -> None:
        """There is none for the devices that were asked about."""
        if self._is_over(now_s):
            return
        if request.epoch == self.epoch and self._adaptation is not None:
            self._adaptation.made(-1, None, must=False)
        leaving = self._leaving_devices()
        self.coordinator.no_plan(request.epoch, reason)
        self._note_leaving(leaving, reason)

    def measured(self, step: int, spans: tuple[Span, ...], now_s: float) -> None:
        """All devices have done a step, and reported these spans since the one before."""
        if not self._is_over(now_s) and self._adaptation is not None:
            self._believe(self._adaptation, self._adaptation.measured(step, spans))

    def probed(self, source: str, target: str, bandwidth_bytes_per_s: float | None, now_s: float) -> None:
        """A link was measured; None where nobody could say."""
        if not self._is_over(now_s) and self._adaptation is not None:
            found = self._adaptation.probed((source, target), bandwidth_bytes_per_s, now_s)
            self._believe(self._adaptation, found)

    def looked(self, tick: Observation, now_s: float) -> None:
        """Time has passed: who is lost, and who could work."""
        if self._is_over(now_s):
            return
        self._tick = tick
        self._leaving |= tick.leaving
        if tick.queued != self._queued:
            self._queued = tick.queued
            self.coordinator.queued_by_engine(tick.queued)
        phase = self.coordinator.phase
        self._miss(phase)
        if self._decide():
            return
        if self._adaptation is not None and phase == "running":
            link = self._adaptation.to_probe(now_s)
            if link is not None:
                self.port.probe_link(*link)
        offers = tick.offers - self._connected
        fresh, self._offered = offers - self._offered, offers
        for device in sorted(fresh):
            self.coordinator.offered(device)
        leaving, self._leaving = self._leaving, set()
        for worker_id in sorted(self._connected):
            if device_of(worker_id) in leaving:
                self.coordinator.leaving(worker_id)

    def _is_over(self, now_s: float) -> bool:
        self._now_s = now_s
        return self._over

    # Who is lost

    def _miss(self, phase: str) -> None:
        """Note who has missed a time limit."""
        machine, tick, now_s = self.coordinator, self._tick, self._now_s
        awaited = {device_of(worker_id) for worker_id in machine.awaited}
        self._deadlines.in_queue(machine.queued if not awaited else (), now_s)
        for device, why in self._deadlines.missed(phase, awaited, now_s, tick.starting.__contains__):
            self._failures.disconnected(device, why)
        for device in sorted(machine.awaited) if phase == "recalling" else ():
            if device not in tick.returning:
                self._failures.disconnected(device, "it has left")
        self._deadlines.lag(*machine.behind, now_s)

    def _decide(self) -> bool:
        """Whether a device is lost, now that it is clear which."""
        joining = self.coordinator.phase == "joining"
        concerned = self._connected | (self.coordinator.awaited if joining else frozenset())
        ended = {device: how for device, how in self._tick.ended.items() if device in concerned}
        if (verdict := self._failures.decide(self._now_s, ended, self._tick.starting)) is None:
            return False
        device, failure = verdict
        self._verdict = str(failure)
        if isinstance(failure, UserError):  # the job's fault: every other device would say the same
            self._over = True
            self.port.halt(Halt(epoch=self.epoch))
            self.port.finish_run(FinishRun("failed", str(failure)))
            return True
        permanent = self._failures.permanent  # one that cannot work is not asked again
        known = {*self._connected, *self.coordinator.devices, *self.coordinator.awaited} - {device}
        further = tuple(worker_id for worker_id in sorted(known) if device_of(worker_id) == device)
        self._failures.cleared(device)
        for name in (device, *further):
            self.port.reject_device(name, self._verdict, permanent=permanent)
        # It is not waited for twice.
        returns = device in self._tick.returning and not permanent and self.coordinator.phase != "recalling"
        self.coordinator.lost(device, without_name(failure, device), workers=further, returns=returns)
        return True

    def _pass_on(self, device: str, body: DeviceReport) -> None:
        try:
            self.coordinator.heard(device, body)
        except OutOfPhase as e:
            self._disbelieve(device, e)

    def _disbelieve(self, device: str, why: Exception | str) -> None:
        self._failures.reported(device_of(device), PeerError(f"device {device!r}: {why}"))

    # What devices report

    def _on_failed(self, device: str, failed: DeviceFailed) -> None:
        owner = device_of(device)
        if failed.fault == "other":
            if failed.epoch == self.epoch:
                self._failures.accused(owner, failed.reason)
        elif failed.failure is not None:
            if failed.epoch == self.epoch:
                self._failures.cleared(owner)  # its neighbours accuse it now
                if failed.shortage is not None:
                    self._short = True
                    if self._adaptation is not None:
                        self._note(self._adaptation.short(device, failed.shortage))
                self._verdict = f"device {device!r}: {failed.failure.reason}"
                self.coordinator.heard(device, failed)
        elif failed.starts_again:
            self._failures.failed(owner, failed.reason)
        else:
            family = UserError if failed.fault == "user" else PeerError
            self._failures.reported(owner, family(f"device {owner!r}: {failed.reason}"))

    def _on_reported(self, device: str, report: ItemReported) -> None:
        due = self._due.get(device)
        if report.item != due or report.item not in self.coordinator.leases.open:
            self._disbelieve(device, f"reported item {report.item}, not {due}")
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
        if adaptation.asks(self._now_s):
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
            self._adaptation.began(self.coordinator.layout.number, start.step, self._now_s)

    def assign_stage(self, device: str) -> None:
        self.port.assign_stage(device)

    def order(self, device: str, body: DeviceOrder) -> None:
        if isinstance(body, Pause):
            self._interrupt()
        self._checks.ordered(body)
        self.port.order(device, body)

    def open_item(self, order: OpenItem) -> None:
        self._checks.opened(order.item)
        if self._interruptions.end(self._now_s):
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
        self._forget(device)
        self.port.disconnect(device)

    def release_device(self, device: str) -> None:
        self._forget(device)
        self.port.release_device(device)

    def _interrupt(self) -> None:
        self._interruptions.begin(self._verdict or self._asked_to_leave(), self._now_s)

    def _forget(self, device: str) -> None:
        self._connected.discard(device)
        self._failures.cleared(device)
        self._offered -= {device}

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
