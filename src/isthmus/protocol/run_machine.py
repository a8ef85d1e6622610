"""The coordinator's side of a run: the `Coordinator`, and everything that a host would otherwise have to decide.

    connections closed, failures, accusations ─► failure detector ─┐
    ticks: processes that ended, offers, who leaves, time limits ──┼─► coordinator ─► instructions
    spans of steps, probes of links ─► adaptation ─────────────────┘

Pure: the host says what time it is with each event. The runtime's host and the simulator's drive the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.adaptation import Adaptation
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.coordinator_events import (
    BeginEpoch,
    CoordinatorEvent,
    CoordinatorInstruction,
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    DeviceOffered,
    DevicesQueued,
    Disconnect,
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
from isthmus.protocol.deadlines import Deadlines
from isthmus.protocol.failures import FailureDetector, without_name
from isthmus.protocol.interruptions import Interruptions, Recovery
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.report_checks import ReportChecks
from isthmus.protocol.run_events import (
    AcceptReport,
    Disconnected,
    LinkProbed,
    Note,
    Observation,
    ProbeLink,
    RejectDevice,
    RunEvent,
    RunInstruction,
    StepMeasured,
)
from isthmus.protocol.run_messages import DeviceFailed, Halt, ItemReported, OpenItem, Pause
from isthmus.session.program import OutOfPhase

Out = list[RunInstruction]
Observe = Callable[[float, RunEvent, Sequence[RunInstruction]], None]
TICK_S = 0.25
"""How often a host looks at its devices."""


class RunMachine:
    """Events in, instructions out. The run is over with `FinishRun`."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        timeout_s: float,
        start_s: float = 0.0,
        adaptation: Adaptation | None = None,
        observe: Observe | None = None,
    ) -> None:
        """`timeout_s`: for a message; `start_s`: for a process to come. Without `adaptation` the figures of the fleet
        stay as they are. `observe` gets every decision: the time, the event and what it led to."""
        self.coordinator = coordinator
        self._observe = observe
        self._adaptation = adaptation
        self._out: Out = []
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

    def handle(self, event: RunEvent, now_s: float) -> Out:
        """Take one event at this time, in seconds of whatever clock; return what to do now."""
        if self._over:
            return []
        if not self._refused(event):
            self._take(event, now_s)
        out, self._out = self._out, []
        if self._observe is not None:
            self._observe(now_s, event, out)
        return out

    def _refused(self, event: RunEvent) -> bool:
        """Whether a device says what none of this run can: it is lost then."""
        late = isinstance(event, FromDevice) and event.epoch != self.epoch
        if late or not isinstance(event, DeviceJoined | FromDevice):
            return False
        try:
            self._checks.check(event, len(self.coordinator.devices))
        except PeerError as e:
            self._failures.reported(device_of(event.device), PeerError(f"device {event.device!r}: {e}"))
            return True
        return False

    def _take(self, event: RunEvent, now_s: float) -> None:
        match event:
            case Observation():
                self._on_observation(event, now_s)
            case Disconnected(device=device, reason=reason):
                self._failures.disconnected(device_of(device), reason)
            case FromDevice(device=device, body=DeviceFailed() as failed):
                self._on_failed(device, failed, now_s)
            case StepMeasured(step=step, spans=spans):
                if self._adaptation is not None:
                    self._believe(self._adaptation.measured(step, spans), now_s)
            case LinkProbed(source=source, target=target, bandwidth_bytes_per_s=found):
                if self._adaptation is not None:
                    self._believe(self._adaptation.probed((source, target), found, now_s), now_s)
            case FromDevice(device=device, body=ItemReported() as report):
                self._on_reported(device, report, now_s)
            case _:
                self._from_peer(event, now_s)

    # Time

    def _on_observation(self, tick: Observation, now_s: float) -> None:
        """Who is lost, and who could work."""
        self._tick = tick
        self._leaving |= tick.leaving
        if tick.queued != self._queued:
            self._queued = tick.queued
            self._coordinate(DevicesQueued(devices=tick.queued), now_s)
        machine, phase = self.coordinator, self.coordinator.phase
        awaited = {device_of(worker_id) for worker_id in machine.awaited}
        self._deadlines.in_queue(machine.queued if not awaited else (), now_s)
        for device, why in self._deadlines.missed(phase, awaited, now_s, tick.starting.__contains__):
            self._failures.disconnected(device, why)
        for device in sorted(machine.awaited) if phase == "recalling" else ():
            if device not in tick.returning:
                self._failures.disconnected(device, "it has left")
        self._deadlines.lag(*machine.behind, now_s)
        if self._decide(now_s):
            return
        if self._adaptation is not None and phase == "running":
            link = self._adaptation.to_probe(now_s)
            self._out += [ProbeLink(*link)] if link is not None else []
        offers = tick.offers - self._connected
        fresh, self._offered = offers - self._offered, offers
        for device in sorted(fresh):
            self._coordinate(DeviceOffered(device=device), now_s)
        leaving, self._leaving = self._leaving, set()
        for worker_id in sorted(self._connected):
            if device_of(worker_id) in leaving:
                self._coordinate(DeviceLeaving(device=worker_id), now_s)

    def _decide(self, now_s: float) -> bool:
        """Whether a device is lost, now that it is clear which."""
        joining = self.coordinator.phase == "joining"
        concerned = self._connected | (self.coordinator.awaited if joining else frozenset())
        ended = {device: how for device, how in self._tick.ended.items() if device in concerned}
        if (verdict := self._failures.decide(now_s, ended, self._tick.starting)) is None:
            return False
        device, failure = verdict
        self._verdict = str(failure)
        if isinstance(failure, UserError):  # the job's fault: every other device would say the same
            self._over = True
            self._out += [Halt(epoch=self.epoch), FinishRun("failed", str(failure))]
            return True
        permanent = self._failures.permanent  # one that cannot work is not asked again
        known = {*self._connected, *self.coordinator.devices, *self.coordinator.awaited} - {device}
        further = tuple(worker_id for worker_id in sorted(known) if device_of(worker_id) == device)
        self._out += [RejectDevice(name, permanent) for name in (device, *further)]
        self._failures.cleared(device)
        # It is not waited for twice.
        returns = device in self._tick.returning and not permanent and self.coordinator.phase != "recalling"
        reason = without_name(failure, device)
        self._coordinate(DeviceLost(device=device, reason=reason, worker_ids=further, returns=returns), now_s)
        return True

    # What devices say

    def _on_failed(self, device: str, failed: DeviceFailed, now_s: float) -> None:
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
                self._coordinate(FromDevice(device, failed), now_s)
        elif failed.starts_again:
            self._failures.failed(owner, failed.reason)
        else:
            family = UserError if failed.fault == "user" else PeerError
            self._failures.reported(owner, family(f"device {owner!r}: {failed.reason}"))

    def _on_reported(self, device: str, report: ItemReported, now_s: float) -> None:
        if report.epoch != self.epoch:
            self._from_peer(FromDevice(device, report), now_s)
            return
        due = self._due.get(device)
        if report.item != due or report.item not in self.coordinator.leases.open:
            refused = PeerError(f"device {device!r}: reported item {report.item}, not {due}")
            self._failures.reported(device_of(device), refused)
            return
        self._due[device] = report.item + 1
        self._out.append(AcceptReport(device, report.item))
        self._from_peer(FromDevice(device, report), now_s)

    def _from_peer(self, event: CoordinatorEvent, now_s: float) -> None:
        """Who says what does not fit is lost to the run."""
        if isinstance(event, DeviceJoined):
            self._connected.add(event.device)
        if isinstance(event, PlanMade):
            event = self._judged(event)
        if isinstance(event, NoPlan) and event.epoch == self.epoch and self._adaptation is not None:
            self._adaptation.made(-1, None, must=False)
        leaving = self._leaving_devices()
        here = DeviceJoined | DeviceOffered | DeviceLeaving | DeviceLost | DevicesQueued | FleetChanged | StopRequested
        try:
            self._coordinate(event, now_s, now=isinstance(event, here))
        except OutOfPhase as e:
            device = getattr(event, "device", "")
            if not device:
                raise
            self._failures.reported(device_of(device), PeerError(f"device {device!r}: {e}"))
        if isinstance(event, NoPlan):
            self._note_leaving(leaving, event.reason)

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

    def _judged(self, made: PlanMade) -> PlanMade:
        """With whether it is worth the change."""
        if self._adaptation is None or made.figures is None or made.epoch != self.epoch:
            return made
        worth_it = self._adaptation.made(made.layout.number, made.figures, must=made.worth_it)
        return msgspec.structs.replace(made, worth_it=worth_it)

    def _believe(self, notes: Iterable[str], now_s: float) -> None:
        """Figures were measured: another plan may be better."""
        assert self._adaptation is not None, "figures are believed by it"
        for text in notes:
            self._note(text)
        if self._adaptation.asks(now_s):
            self._coordinate(FleetChanged(), now_s)

    def _note(self, text: str) -> None:
        self._out.append(Note(text))

    # The coordinator

    def _coordinate(self, event: CoordinatorEvent, now_s: float, *, now: bool = True) -> None:
        """`now`: what is of this process is of the epoch that it is."""
        if now and not isinstance(event, FromDevice):
            event = msgspec.structs.replace(event, epoch=self.epoch)
        for instruction in self.coordinator.handle(event):
            self._follow(instruction, now_s)

    def _follow(self, instruction: CoordinatorInstruction, now_s: float) -> None:
        match instruction:
            case BeginEpoch(step=step, first_item=first_item):
                self._due = dict.fromkeys(self.coordinator.devices, first_item)
                self._checks.began(instruction)
                self._out.append(instruction)
                self._interruptions.epoch_began(instruction)
                if self._adaptation is not None:
                    self._adaptation.began(self.coordinator.layout.number, step, now_s)
                return
            case Order(body=Pause()):
                self._interruptions.begin(self._verdict or self._asked_to_leave(), now_s)
            case MakePlan(waits=waits):
                if waits:
                    self._interruptions.begin(self._verdict or self._asked_to_leave(), now_s)
                believed = self._adaptation.believed if self._adaptation is not None else None
                instruction = msgspec.structs.replace(instruction, believed=believed)
            case OpenItem(item=item):
                self._checks.opened(item)
                if self._interruptions.end(now_s):
                    self._verdict = ""
            case ItemDone(item=item) if item.kind == "train":
                self._interruptions.step_done(item.step + 1)
                self._short = False
            case Disconnect(device=device) | ReleaseDevice(device=device):
                self._connected.discard(device)
                self._failures.cleared(device)
                self._offered -= {device}
            case Order():
                self._checks.ordered(instruction)
            case FinishRun(outcome=outcome):
                self._over = True
                reason = instruction.reason
                if outcome == "lost" and not self.coordinator.survives:
                    reason = self._verdict
                instruction = msgspec.structs.replace(instruction, reason=reason, short_of_memory=self._short)
            case _:
                pass
        self._out.append(instruction)
