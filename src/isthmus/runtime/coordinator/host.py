"""The coordinator's driver: carries out a `Coordinator` machine's instructions over real connections."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from isthmus.errors import Diverged, FleetTooSmall, IsthmusError, PeerError, UserError
from isthmus.plans.worker_ids import device_of, is_first
from isthmus.protocol.coordinator_events import (
    AssignStage,
    BeginEpoch,
    CallDevice,
    CommitCheckpoint,
    DeviceJoined,
    Disconnect,
    FinishRun,
    ItemDone,
    MakePlan,
    NoPlan,
    Order,
    PlanMade,
    ReceiveState,
    ReleaseDevice,
    RestartRun,
    StopRequested,
)
from isthmus.protocol.machine import FromDevice
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
from isthmus.protocol.run_machine import TICK_S, RunMachine
from isthmus.protocol.run_messages import (
    DeviceReady,
    Halt,
    ItemReported,
    OpenItem,
    PlaceWeights,
    RetireSnapshots,
    RunOrder,
    SendState,
    StateFetched,
    WeightsRead,
)
from isthmus.protocol.work import Item
from isthmus.runtime.coordinator.backend import NoSession, Session, paths_of
from isthmus.runtime.coordinator.joiners import Joiners
from isthmus.runtime.coordinator.run_callbacks import Address, Outcome, RunCallbacks
from isthmus.runtime.messages.all_messages import FROM_DEVICES, AnyMessage, content
from isthmus.runtime.messages.assignment import Assignment
from isthmus.runtime.messages.run import AssignMessage, JoinRun, ToCoordinator, ToDevice
from isthmus.runtime.messages.state_transfer import (
    StateMessage,
    StatePart,
)
from isthmus.runtime.processes.signals import ComputeThreads, Stop
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.message_sender import start_heartbeats
from isthmus.trace import Span
from isthmus.training.layout import header_of

MOST_SPANS = 500_000
"""The most spans that a trace keeps: those of days of training would not fit in memory."""
FAMILIES: Mapping[str, type[IsthmusError]] = {"lost": PeerError, "diverged": Diverged, "failed": UserError}
"""The error that each ending of a failed run raises."""
LATE_ITEMS = 64
"""Spans of an item may come with a later item's report, at most this many later."""


class CoordinatorHost:
    """Runs the machine in the thread that calls `coordinate`, over the connections that its acceptor hands on."""

    def __init__(
        self, machine: RunMachine, run: str, callbacks: RunCallbacks, *, timeout_s: float, others: Sequence[str] = ()
    ) -> None:
        """`others` may join besides the devices of the first plan."""
        self.machine = machine
        self._run = run
        self._callbacks = callbacks
        self._timeout_s = timeout_s
        self._inbox: queue.SimpleQueue[ReceivedMessage | RunEvent] = queue.SimpleQueue()
        self._planners = ComputeThreads()
        self._over = threading.Event()
        self._lanes: dict[str, SendLane] = {}
        self._addresses: dict[str, Address] = {}
        self._items: dict[int, Item] = {}
        self._exchanges: set[int] = set()
        """Indices of items that came with one."""
        self._fresh: list[Span] = []
        self._spans: list[Span] = []
        self._late_s: dict[str, float] = {}
        self._origin_s = 0.0
        self._failure: IsthmusError | None = None
        self._assigned: Mapping[str, Assignment] = {}
        self._joiners = Joiners(run, callbacks, self._lanes)
        self._session: Session = NoSession()
        self._at_hand: tuple[ItemReported, Mapping[str, Tensor]] | None = None
        """The report that the machine is asked about."""
        devices = {*machine.coordinator.devices, *others}
        self.acceptor = Acceptor(run, devices, on_message=self._inbox.put, guard=self._guard, timeout_s=timeout_s)
        """Takes the devices' connections."""

    def coordinate(self, session: Session | None = None, stop: Stop | None = None) -> Outcome:
        """Run to the end, with the devices that are at work.

        To stop is to finish what is leased, to save and to end; a second Ctrl-C ends at once.
        """
        self._session = session or self._session
        start_heartbeats(self._run, self._timeout_s, self._over, lambda: list(self._lanes.values()))
        try:
            with (stop or Stop()).calls(lambda: self._inbox.put(StopRequested())):
                finish = self._loop()
            ended_s = time.monotonic()
            for lane in self._lanes.values():
                lane.close()
        finally:
            self._over.set()
            self.acceptor.close()
            self._planners.end()
        return Outcome(
            outcome=finish.outcome,
            reason=str(self._failure or finish.reason),
            failure=self._failure,
            spans=tuple(self._spans),
            late_s=self._late_s,
            elapsed_s=ended_s - (self._origin_s or ended_s),
            recoveries=self.machine.recoveries,
            origin_s=self._origin_s,
        )

    def tell(self, event: RunEvent) -> None:
        """Something that a person or another part of the program wants. Any thread."""
        self._inbox.put(event)

    def _loop(self) -> FinishRun:
        finish: FinishRun | None = None
        looked_s = 0.0
        while finish is None:
            with contextlib.suppress(queue.Empty):
                for event in self._translate(self._inbox.get(timeout=TICK_S)):
                    finish = self._handle(event) or finish
            now_s = time.monotonic()
            if finish is None and (self.machine.urgent or now_s - looked_s >= TICK_S):
                looked_s = now_s
                finish = self._handle(self._look())
        return finish

    def _look(self) -> Observation:
        session, machine = self._session, self.machine.coordinator
        awaited = machine.awaited | machine.queued
        known: Collection[str] = {*map(device_of, self._lanes), *machine.devices, *awaited}
        return Observation(
            starting=frozenset(filter(session.starting, known)),
            ended=session.ended(),  # after who runs: one that ends meanwhile is in both
            returning=frozenset(filter(session.returns, known)),
            queued=frozenset(filter(self._callbacks.is_known, session.queued())),
            offers=frozenset(filter(self._callbacks.is_known, session.offers())),
            leaving=frozenset(session.leaving()),
        )

    def _handle(self, event: RunEvent) -> FinishRun | None:
        finish: FinishRun | None = None
        for instruction in self.machine.handle(event, time.monotonic()):
            finish = self._carry_out(instruction) or finish
        if finish is not None and finish.outcome in FAMILIES:
            family = FleetTooSmall if finish.short_of_memory else FAMILIES[finish.outcome]
            self._failure = family(finish.reason)
        return finish

    def _guard(self, device: str, message: AnyMessage) -> None:
        """Refuse what no device sends, before its tensors are received. Any thread."""
        if not isinstance(message, FROM_DEVICES):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        if isinstance(message, StateMessage | StatePart):
            self._joiners.check(device, message, self.machine.epoch, self.machine.coordinator.leases.last_step)
            return
        body = content(message)
        item = self._items.get(body.item) if isinstance(body, ItemReported) else None
        late = isinstance(body, ItemReported) and item is not None and body.epoch != self.machine.epoch
        wanted = isinstance(body, WeightsRead) and body.item in self._exchanges
        if isinstance(body, StateFetched) or late or wanted:
            self._callbacks.check_parts(message.tensors)
        elif item is not None and item.kind == "save":
            self._callbacks.check_state(device, message.tensors)
        elif message.tensors:
            raise PeerError(f"sent {type(body).__name__} with tensors")

    def _translate(self, received: ReceivedMessage | RunEvent) -> list[RunEvent]:
        """Return a device's message as events for the machine."""
        if not isinstance(received, tuple):
            return [received]
        device, message, tensors = received
        if isinstance(message, JoinRun):
            return [self._joined(device, message)]
        if device not in self._lanes:
            return []  # of one that was fenced meanwhile
        if message is None:
            return [Disconnected(device=device)]
        if isinstance(message, Exception):
            return [Disconnected(device=device, reason=str(message).removeprefix(f"device {device!r}: "))]
        if isinstance(message, StateMessage | StatePart):
            current = message.epoch == self.machine.epoch
            return [*self._joiners.pass_on(device, message, tensors)] if current else []
        if not isinstance(message, ToCoordinator):
            return []  # a heartbeat
        named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
        match message.body:
            case DeviceReady(paths=paths, notes=notes):
                for note in notes:
                    self._callbacks.note(f"{device}: {note}")
                if is_first(device):
                    self._session.linked(device, paths_of(device, paths, self.machine.coordinator.devices))
            case StateFetched(epoch=epoch) if epoch == self.machine.epoch:
                self._callbacks.give(named)
            case WeightsRead(epoch=read, item=item):
                if read == self.machine.epoch and item in self._exchanges:
                    self._callbacks.weights_read(self._items[item], named)
                return []
            case ItemReported() as report:
                self._at_hand = report, named
            case _:
                pass
        return [FromDevice(device, message.body)]

    def _joined(self, device: str, message: JoinRun) -> DeviceJoined:
        channel = self.acceptor.channel(device)
        assert isinstance(channel, SocketChannel), "devices connect by sockets"
        self._lanes[device] = SendLane(channel, timeout_s=self._timeout_s)
        party = channel.party.id if channel.party is not None else ""
        self._addresses[device] = Address(message.host, message.port, party)
        return DeviceJoined(device=device, holdings=message.holdings)

    def _accept_report(self, device: str) -> None:
        assert self._at_hand is not None, "only a report at hand is accepted"
        (report, state), self._at_hand = self._at_hand, None
        reported_spans = map(self._localise, report.spans)
        self._fresh += [s for s in reported_spans if s.other != s.device]  # what stays in a device is on no link
        owner = device_of(device)
        self._late_s[owner] = self._late_s.get(owner, 0.0) + report.late_s
        self._callbacks.fingerprinted(device, report.fingerprints)
        item = self._items[report.item]
        if item.kind == "save":
            self._callbacks.saved(item, device, state, report.peak)

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

    def _carry_out(self, instruction: RunInstruction) -> FinishRun | None:
        run, epoch = self._run, self.machine.epoch
        match instruction:
            case BeginEpoch():
                self._begin(instruction)
            case AssignStage(device=device):
                if not self._assigned:
                    self._assigned = self._callbacks.assignments(self._addresses)
                self._send(device, AssignMessage(run=run, assignment=self._assigned[device]))
            case Order(device=device, body=PlaceWeights(own=own) as body):
                weights = self._callbacks.weights(device, own)
                headers = tuple(header_of(name, t) for name, t in weights.items())
                self._send(device, ToDevice(run=run, body=body, tensors=headers), list(weights.values()))
            case Order(device=device, body=body):
                if isinstance(body, SendState) and not body.parts:
                    self._joiners.forget(device)
                self._send(device, ToDevice(run=run, body=body))
            case OpenItem(item=item):
                self._open(item, instruction)
            case ItemDone(item=item, loss=loss, note_=note_, sums=sums):
                self._advance(item, loss)
                if sums:
                    self._callbacks.evaluated(item, sums)
                if note_:
                    self._callbacks.note(note_)
            case CommitCheckpoint(item=item, finite=finite):
                self._callbacks.commit(item, finite=finite)
            case Disconnect(device=device):
                self._dismiss(device)
            case MakePlan():
                self._planners.start(partial(self._plan, instruction, epoch), "planner")
            case CallDevice(device=device):
                if is_first(device):  # its other workers come with it
                    self._session.call(device)
            case RestartRun(devices=devices, count=count, most=most, reasons=reasons):
                again = f"calling {', '.join(devices)} again, attempt {count} of {most}"
                self._callbacks.note(f"too few devices are left ({reasons}): {again}")
            case ReceiveState():
                self._joiners.follow(instruction, epoch)
            case RetireSnapshots(step=step):
                self._callbacks.acknowledged(step)
                self._broadcast(self._lanes, instruction)
            case ReleaseDevice(device=device):
                self._callbacks.note(f"{device} has left")
                self._send(device, ToDevice(run=run, body=Halt(epoch=epoch)))
                self._lanes[device].drain()
                self._dismiss(device)
            case Halt():
                self._broadcast(self._lanes, instruction)
            case FinishRun():
                return instruction
            case Note(text=text):
                self._callbacks.note(text)
            case AcceptReport(device=device):
                self._accept_report(device)
            case RejectDevice(device=device, permanent=permanent):
                self.acceptor.forget(device, permanent=permanent)
            case ProbeLink(source=source, target=target):
                threading.Thread(target=self._probe, args=(source, target), name="probe", daemon=True).start()
        return None

    def _broadcast(self, devices: Iterable[str], body: RunOrder) -> None:
        for device in devices:
            self._send(device, ToDevice(run=self._run, body=body))

    def _send(self, device: str, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """To one who may have gone meanwhile."""
        if (lane := self._lanes.get(device)) is not None:
            lane.put(message, tensors)

    def _dismiss(self, device: str) -> None:
        lane = self._lanes.pop(device, None)
        self.acceptor.forget(device)
        if lane is not None:
            lane.close(0.0)

    def _plan(self, wanted: MakePlan, epoch: int) -> None:
        try:
            layout, figures = self._callbacks.plan(wanted)
        except Exception as e:  # of any kind: the run waits for a plan, and must learn that there is none
            reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
            self._inbox.put(NoPlan(reason=reason, epoch=epoch))
        else:
            made = PlanMade(layout=layout, figures=figures, worth_it=wanted.must, epoch=epoch)
            self._inbox.put(made)

    def _probe(self, source: str, target: str) -> None:
        """In a thread of its own: it takes seconds."""
        found = None
        try:
            found = self._callbacks.emulated((source, target))
            found = self._session.bandwidth(source, target) if found is None else found
        finally:  # nothing found, whatever the reason: another probe comes later
            self._inbox.put(LinkProbed(source=source, target=target, bandwidth_bytes_per_s=found))

    def _begin(self, begin: BeginEpoch) -> None:
        self._callbacks.begin(begin, self.machine.coordinator.layout)
        self._assigned = {}
        self._joiners.clear()

    def _open(self, item: Item, order: OpenItem) -> None:
        self._origin_s = self._origin_s or time.monotonic()
        self._items[item.index] = item
        self._items.pop(item.index - LATE_ITEMS - self.machine.coordinator.spec.lease_ahead, None)
        self._exchanges &= self._items.keys()
        exchange, amounts = self._callbacks.opened(item) or (None, {})
        if exchange is not None:
            self._exchanges.add(item.index)
            order = msgspec.structs.replace(order, exchange=exchange)
        headers = tuple(header_of(name, t) for name, t in amounts.items())
        for device in self.machine.coordinator.devices:
            self._send(device, ToDevice(run=self._run, body=order, tensors=headers), list(amounts.values()))

    def _advance(self, item: Item, loss: float | None) -> None:
        fresh, self._fresh = self._fresh, []
        if len(self._spans) < MOST_SPANS:
            self._spans += fresh
        self._callbacks.advanced(item, loss, tuple(fresh))
        if item.kind == "train":
            self._inbox.put(StepMeasured(step=item.step, spans=tuple(fresh)))
