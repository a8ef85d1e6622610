"""The coordinator's driver: it does what a run's machine asks, over real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from isthmus.accelerators.copies import Fill
from isthmus.errors import Diverged, FleetTooSmall, IsthmusError, PeerError, UserError
from isthmus.plans.plan import device_of, is_first
from isthmus.programs.pipeline import Pipeline
from isthmus.protocol.run_messages import (
    DeviceOrder,
    DeviceReady,
    DeviceReport,
    GiveState,
    Halt,
    Item,
    ItemReported,
    OpenItem,
    PlaceWeights,
    RetireSnapshots,
    SendState,
    TakeState,
    WeightsLacked,
    WeightsRead,
)
from isthmus.protocol.run_ports import EpochStart, FinishRun, PlanRequest
from isthmus.runtime.coordinator.backend import DevicesAtWork, paths_of
from isthmus.runtime.coordinator.parameter_store import Placed
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.coordinator.stored_parts import written_headers
from isthmus.runtime.messages.all_messages import FROM_DEVICES, AnyMessage, content
from isthmus.runtime.messages.assignment import Assignment, Peer, ReceiveStateMessage
from isthmus.runtime.messages.run import AssignMessage, JoinRun, ToCoordinator, ToDevice
from isthmus.runtime.processes.signals import ComputeThreads, Stop
from isthmus.runtime.session_host import SessionHost
from isthmus.runtime.transport.channel import Landing, in_host_memory, nowhere
from isthmus.trace import Span
from isthmus.training.checkpoint import LandedPart
from isthmus.training.layout import header_of
from isthmus.training.stored import Sent, sent_header

if TYPE_CHECKING:
    from isthmus.runtime.coordinator.run import RunController

MOST_SPANS = 500_000  # the most spans that a trace keeps: those of days of training would not fit in memory
FAMILIES: Mapping[str, type[IsthmusError]] = {"lost": PeerError, "diverged": Diverged, "failed": UserError}
"""The error that each ending of a failed run raises."""
LATE_ITEMS = 64  # spans of an item may come with a later item's report, at most this many later


class CoordinatorHost(SessionHost[Pipeline]):
    """The port of a run's machine."""

    def __init__(
        self, machine: Pipeline, run: str, callbacks: RunController, *, timeout_s: float, others: Sequence[str] = ()
    ) -> None:
        """`others` may join besides the devices of the first plan."""
        super().__init__(machine, run, {*machine.devices, *others}, timeout_s=timeout_s)
        machine.port = self
        self._callbacks = callbacks
        self._planners = ComputeThreads()
        self._items: dict[int, Item] = {}
        self._exchanges: set[int] = set()  # indices of items that came with one
        self._fresh: list[Span] = []
        self._spans: list[Span] = []
        self._late_s: dict[str, float] = {}
        self._origin_s = self._ended_s = 0.0
        self._finish: FinishRun | None = None
        self._assigned: Mapping[str, Assignment] = {}
        self._placed = Placed()
        self._landed: dict[tuple[str, int], LandedPart] = {}  # what came with reports of saves, by device and item
        self._doubts: dict[tuple[str, int], str] = {}
        """Why a part of a checkpoint in the store is not what its device says, by device and item; empty if it is."""
        self._at_hand: ItemReported | None = None  # the report that the machine is asked about

    def coordinate(self, devices: DevicesAtWork | None = None, stop: Stop | None = None) -> Outcome:
        """Run to the end, with the devices that are at work.

        To stop is to finish what is leased, to save and to end; a second Ctrl-C ends at once.
        """
        self.drive(devices, stop)
        finish = self._finish
        assert finish is not None, "a machine that is over has finished its run"
        failure: IsthmusError | None = None
        if finish.outcome in FAMILIES:
            family = FleetTooSmall if finish.short_of_memory else FAMILIES[finish.outcome]
            failure = family(finish.reason)
        return Outcome(
            outcome=finish.outcome,
            reason=str(failure or finish.reason),
            failure=failure,
            spans=tuple(self._spans),
            late_s=self._late_s,
            elapsed_s=self._ended_s - (self._origin_s or self._ended_s),
            recoveries=self.session.recoveries,
            origin_s=self._origin_s,
        )

    def close(self) -> None:
        super().close()
        self._planners.end()

    def takes_offer(self, device: str) -> bool:
        return self._callbacks.is_known(device)

    def guard(self, device: str, message: AnyMessage) -> None:
        if not isinstance(message, FROM_DEVICES):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        body = content(message)
        item = self._items.get(body.item) if isinstance(body, ItemReported) else None
        late = isinstance(body, ItemReported) and item is not None and body.epoch != self.session.epoch
        wanted = isinstance(body, WeightsRead) and body.item in self._exchanges
        if isinstance(body, ItemReported) and body.written is not None and body.epoch == self.session.epoch:
            if message.tensors or item is None or item.kind != "save":
                raise PeerError(f"sent {type(body).__name__} with a part in the store, expected none")
            self._callbacks.now.check_state(device, written_headers(body.written))
        elif late or wanted:
            self._callbacks.now.check_parts(message.tensors)
        elif item is not None and item.kind == "save":
            self._callbacks.now.check_state(device, message.tensors)
        elif message.tensors:
            raise PeerError(f"sent {type(body).__name__} with tensors")

    def landing(self, device: str) -> Landing:
        def land(message: AnyMessage, fill: Fill) -> list[Tensor]:
            body = content(message)
            if isinstance(body, ItemReported) and body.written is not None and body.epoch == self.session.epoch:
                self._doubts[device, body.item] = self._callbacks.doubt(device, self._items[body.item], body.written)
            if not message.tensors or not isinstance(body, ItemReported):
                return in_host_memory(message, fill)
            if body.epoch != self.session.epoch:
                return nowhere(message, fill)
            self._landed[device, body.item] = self._callbacks.land(device, message.tensors, fill)
            return []

        return land

    def received(self, device: str, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if isinstance(message, ToCoordinator):
            landed = isinstance(message.body, ItemReported)
            named = {} if landed else {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
            self._hear(device, message.body, named)

    def _hear(
        self, device: str, body: DeviceReport | WeightsRead | WeightsLacked, tensors: Mapping[str, Tensor]
    ) -> None:
        match body:
            case DeviceReady(paths=paths, notes=notes):
                for note in notes:
                    self.note(f"{device}: {note}")
                if is_first(device):
                    self.devices.linked(device, paths_of(device, paths, self.session.devices))
            case WeightsRead(epoch=read, item=item):
                if read == self.session.epoch and item in self._exchanges:
                    self._callbacks.weights_read(self._items[item], tensors)
                return
            case WeightsLacked(names=names, reason=reason):
                if body.epoch == self.session.epoch:
                    order, values = self._placed.lacking(device, names)
                    self.note(f"{device}: {len(names)} weights come from the coordinator: {reason}")
                    self._send_with(device, order, values)
                return
            case ItemReported(written=written, item=item):
                doubt = self._doubts.pop((device, item), "") if written is not None else ""
                self._at_hand = body = msgspec.structs.replace(body, doubt=doubt)
            case _:
                pass
        self.session.heard(device, body)
        if isinstance(body, ItemReported):
            self._landed.pop((device, body.item), None)  # it was not wanted

    def joined(self, device: str, join: JoinRun) -> None:
        self._callbacks.fault("joined", device)
        self.session.joined(device, join.holdings)

    # What the machine asks

    def accept_report(self, device: str, item: int) -> None:
        assert self._at_hand is not None, "only a report at hand is accepted"
        report, self._at_hand = self._at_hand, None
        reported_spans = map(self._localise, report.spans)
        self._fresh += [s for s in reported_spans if s.other != s.device]  # what stays in a device is on no link
        owner = device_of(device)
        self._late_s[owner] = self._late_s.get(owner, 0.0) + report.late_s
        self._callbacks.watcher.late(owner, report.late_s)
        self._callbacks.fingerprints.add(device, report.fingerprints)
        done = self._items[item]
        if done.kind == "save":
            if report.unwritten:
                self.note(f"{device}: its part of the checkpoint goes to the coordinator: {report.unwritten}")
            landed = self._landed.pop((device, item), None)
            self._callbacks.saved(done, device, landed or report.written, report.peak)

    def begin_epoch(self, start: EpochStart) -> None:
        self._callbacks.begin(start, self.session.layout)
        self._assigned = {}
        self._landed.clear()
        self._doubts.clear()

    def assign_stage(self, device: str) -> None:
        if not self._assigned:
            self._assigned = self._callbacks.assignments(self.addresses)
        self.send(device, AssignMessage(run=self.run, assignment=self._assigned[device]))

    def order(self, device: str, body: DeviceOrder) -> None:
        weights: Mapping[str, Sent] = {}
        others: Collection[str] = ()
        match body:
            case PlaceWeights(own=own, donors=others):
                values = self._callbacks.weights(device, own.union(*others.values()))
                body, weights = self._placed.split(device, body, values, *self._callbacks.elsewhere(values))
            case TakeState(donors=others) | GiveState(receivers=others) | SendState(receivers=others):
                pass
            case _:
                pass
        peers = self._callbacks.peers(device, others, self.addresses) if others else ()
        self._send_with(device, body, weights, peers)

    def _send_with(
        self, device: str, body: DeviceOrder, weights: Mapping[str, Sent], peers: tuple[Peer, ...] = ()
    ) -> None:
        headers = tuple(sent_header(name, t) for name, t in weights.items())
        self.send(device, ToDevice(run=self.run, body=body, tensors=headers, peers=peers), list(weights.values()))

    def open_item(self, order: OpenItem) -> None:
        item = self._callbacks.placed(order.item)
        order = msgspec.structs.replace(order, item=item)
        self._origin_s = self._origin_s or time.monotonic()
        self._items[item.index] = item
        self._items.pop(item.index - LATE_ITEMS - self.session.spec.lease_ahead, None)
        self._exchanges &= self._items.keys()
        exchange, amounts = self._callbacks.opened(item) or (None, {})
        if exchange is not None:
            self._exchanges.add(item.index)
            order = msgspec.structs.replace(order, exchange=exchange)
        headers = tuple(header_of(name, t) for name, t in amounts.items())
        for device in self.session.devices:
            self.send(device, ToDevice(run=self.run, body=order, tensors=headers), list(amounts.values()))

    def retire_snapshots(self, order: RetireSnapshots) -> None:
        self._callbacks.watcher.acknowledged(order.step)
        for device in self.lanes:
            self.send(device, ToDevice(run=self.run, body=order))

    def halt(self, order: Halt) -> None:
        for device in self.lanes:
            self.send(device, ToDevice(run=self.run, body=order))

    def item_done(self, item: Item, loss: float | None, note: str, sums: tuple[float, ...]) -> None:
        fresh, self._fresh = tuple(self._fresh), []
        if len(self._spans) < MOST_SPANS:
            self._spans += fresh
        self._callbacks.advanced(item, loss, fresh)
        if item.kind == "train":
            self.inbox.put(lambda: self.session.measured(item.step, fresh))
        if sums:
            self._callbacks.watcher.evaluated(item, sums)
        if note:
            self.note(note)

    def commit_checkpoint(self, item: Item, *, finite: bool) -> None:
        self._callbacks.commit(item, finite=finite)

    def give_up_checkpoint(self, item: Item, device: str, reason: str) -> None:
        self.note(f"the checkpoint after step {item.step} is not kept: device {device!r}: {reason}")
        self._callbacks.give_up(item)

    def disconnect(self, device: str) -> None:
        self.hang_up(device)

    def make_plan(self, request: PlanRequest) -> None:
        self._planners.start(partial(self._plan, request), "planner")

    def call_device(self, device: str) -> None:
        if is_first(device):  # its other workers come with it
            self.devices.call(device)

    def restart_run(self, devices: tuple[str, ...], count: int, most: int, reasons: str) -> None:
        again = f"calling {', '.join(devices)} again, attempt {count} of {most}"
        self.note(f"too few devices are left ({reasons}): {again}")

    def receive_state(self, device: str, number: int, step: int, donated: Mapping[str, frozenset[str]]) -> None:
        trained, config = self._callbacks.updates()
        self.send(
            device,
            ReceiveStateMessage(
                run=self.run,
                epoch=self.session.epoch,
                number=number,
                step=step,
                donated={donor: self._callbacks.now.shapes(parts) for donor, parts in donated.items()},
                trained=trained,
                config=config,
                peers=self._callbacks.peers(device, donated, self.addresses),
            ),
        )
        if donated:
            self.note(f"{device} gets its state, from step {step} on, while the others train")

    def release_device(self, device: str) -> None:
        self._callbacks.fault("left", device)
        self.note(f"{device} has left")
        self.send(device, ToDevice(run=self.run, body=Halt(epoch=self.session.epoch)))
        self.lanes[device].drain()
        self.disconnect(device)

    def finish_run(self, finish: FinishRun) -> None:
        self._finish, self._ended_s = finish, time.monotonic()

    def note(self, text: str) -> None:
        self._callbacks.watcher.noted(text)

    def reject_device(self, device: str, reason: str, *, permanent: bool) -> None:
        self._callbacks.fault("lost", device, reason)
        self.acceptor.forget(device, permanent=permanent)

    def probe_link(self, source: str, target: str) -> None:
        threading.Thread(target=self._probe, args=(source, target), name="probe", daemon=True).start()

    def _localise(self, span: Span) -> Span:
        """A device speaks of items and of the machine's clock; a trace of steps and of the run's."""
        item = self._items.get(span.step)
        return msgspec.structs.replace(
            span,
            step=item.step if item is not None else -1,
            device=device_of(span.device),
            other=device_of(span.other),
            start_s=span.start_s - self._origin_s,
            end_s=span.end_s - self._origin_s,
        )

    def _plan(self, request: PlanRequest) -> None:
        try:
            layout, figures = self._callbacks.plans.make(request)
        except Exception as e:  # of any kind: the run waits for a plan, and must learn that there is none
            reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
            self.inbox.put(lambda: self.session.no_plan(request, reason))
        else:
            self.inbox.put(lambda: self.session.planned(request, layout, figures))

    def _probe(self, source: str, target: str) -> None:
        """In a thread of its own: it takes seconds."""
        found = None
        try:
            found = self._callbacks.emulated((source, target))
            found = self.devices.bandwidth(source, target) if found is None else found
        finally:  # nothing found, whatever the reason: another probe comes later
            bandwidth_bytes_per_s = found
            self.inbox.put(lambda: self.session.probed(source, target, bandwidth_bytes_per_s))
