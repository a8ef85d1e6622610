"""The host of a federated coordinator: what it asks is done over connections to executors' processes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from isthmus.errors import Diverged, PeerError, UserError
from isthmus.federated.server import Server
from isthmus.programs.masked import TakeMasksOff, Unmasking
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import ExecutorOrder, PhaseId, PhaseOpened, PhaseSetup, TasksGranted
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_messages import SecureOrder, SecureReport
from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.federated.update_receiver import SharedBroadcast, UpdateReceiver
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.messages.federated import FromExecutor, StateReport, ToExecutor
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.session_host import SessionHost
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import MessageChannel, SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.message_sender import MessageSender, Outbox, headers_of, switch_interval_s
from isthmus.training.layout import TensorHeader

FLUSH_S = 5.0


class SiteAcceptor(Acceptor):
    """A new connection of a site replaces its old one: the site noticed before the coordinator that the old one is
    dead."""

    replaces = True


class RoundMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's measurement of a round. Bytes are whole frames, of all executors, and the bytes that they read and
    wrote in shared memory in place of frames."""

    seconds: float
    opened_at_s: float  # since 1970, by this machine's clock
    sent_bytes: int
    received_bytes: int
    trips: int = 0  # messages that brought values: sums or collected ones
    value_bytes: int = 0  # bytes of those values, without headers


def ended(finish: Finish) -> Finish:
    """Return how a run ended that is done or interrupted; UserError, PeerError and Diverged where it could not go
    on."""
    if finish.outcome == "failed":
        raise UserError(finish.reason)
    if finish.outcome == "diverged":
        raise Diverged(finish.reason)
    if finish.outcome == "lost":
        raise PeerError(finish.reason)
    return finish


class ConnectionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How the coordinator and its executors talk. The default is for processes of this machine."""

    run: str
    timeout_s: float
    acceptor: type[Acceptor] = Acceptor
    apart: bool = False
    """Each output has a thread of its own: an executor that receives nothing does not delay the others."""
    broadcast_memory: SharedBroadcast | None = None  # where executors of this machine read the broadcast


def over_networks(run: str, timeout_s: float) -> ConnectionPolicy:
    """Return how the coordinator talks to sites, and to devices that joined."""
    return ConnectionPolicy(run=run, timeout_s=timeout_s, acceptor=SiteAcceptor, apart=True)


class FederatedHost(SessionHost[Rounds]):
    """The port of the machine: it does what the machine asks over the connections that its acceptor hands on.

    What an executor says is acted on by the thread that receives it, one at a time: another thread would first have to
    wake up, which takes as long as to decide. That thread also sends, after the lock is released. The thread that
    calls `coordinate` looks at the clock.
    """

    def __init__(
        self,
        machine: Rounds,
        server: Server,
        receiver: UpdateReceiver,
        policy: ConnectionPolicy,
        *,
        committed: Callable[[RoundRecord, RoundMeasure], Callable[[], None] | None],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`committed` is called before the next round opens, and what it returns once executors are at work on that
        one. `note` receives a line for each lost executor."""
        self._names = set(machine.executors)  # who may join
        super().__init__(machine, policy.run, self._names, timeout_s=policy.timeout_s, acceptor=policy.acceptor)
        machine.port = self
        self._server = server
        self._receiver = receiver
        self._policy = policy
        self._committed = committed
        self._note = note
        self._deciding = threading.Lock()
        self._begun = threading.Event()
        self._senders: dict[str, SendLane | MessageSender] = {}
        self._outboxes: dict[str, Outbox] = {}  # messages that wait for each executor
        self._later = Outbox()  # messages that can wait until executors have new tasks
        self._unsent: list[Outbox] = []
        self._opened = False
        """Since the lock was taken: the outboxes whose messages wait, and whether a phase was opened."""
        self._channels: list[MessageChannel] = []
        self._phase_id: PhaseId | None = None
        self._broadcast: Mapping[str, Tensor] = {}
        self._in_shared_memory: tuple[TensorHeader, ...] = ()
        self._shown_bytes = 0
        self._opened_s = 0.0
        self._counted = (0, 0, 0, 0)
        self._failure: BaseException | None = None

    def coordinate(self, devices: DevicesAtWork | None = None, stop: Stop | None = None) -> Finish:
        """Run to the end. `devices` are the executors' processes, where they are known. `stop` drops the open round and
        ends the run.
        """
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(switch_interval_s(len(self.session.executors)))
        try:
            self.drive(devices, stop)
        finally:
            sys.setswitchinterval(before_s)
        if self._failure is not None:
            raise self._failure
        assert self.session.finish is not None, "nothing more is decided"
        return self.session.finish

    def decide(self) -> None:
        self.look()  # before any phase: deadlines count from its opening
        self._begun.set()
        super().decide()

    def farewell(self) -> None:
        for name, out in list(self._senders.items()):
            self._outboxes[name].finish()
            out.close(FLUSH_S)
        self._later.finish()

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far, whole frames, of all executors."""
        return sum(c.sent_bytes for c in self._channels), sum(c.received_bytes for c in self._channels)

    def receivers(self) -> list[SendLane | MessageSender]:
        return [out for name, out in list(self._senders.items()) if self.session.is_here(name)]

    # Threads

    @property
    def done(self) -> bool:
        return self.session.over or self._failure is not None

    @contextlib.contextmanager
    def deciding(self) -> Generator[None]:
        with self._deciding:
            yield
            send = self._decided()
        send()

    def on_message(self, received: ReceivedMessage) -> Callable[[], None] | None:
        """In the thread that receives it, which then calls what this returns."""
        self._begun.wait()
        with self._deciding:
            if self.done:
                return None
            with self._guarded():
                self.take(received)
                if self.session.urgent:
                    self.look()
            if self.session.suspects:
                self.inbox.put(lambda: None)  # the thread that drives is to look sooner
            return self._decided()

    def _decided(self) -> Callable[[], None]:
        """To be called without the lock, which the caller holds: it sends what was decided."""
        unsent, self._unsent, opened, self._opened = self._unsent, [], self._opened, False
        return partial(self._send, unsent, opened=opened)

    def _send(self, unsent: Sequence[Outbox], *, opened: bool) -> None:
        """Messages leave; then there is time to plan the next round, and for what can wait."""
        with self._guarded():
            for outbox in unsent:
                outbox.work()
            if opened:
                with self._deciding:
                    if not self.done:
                        self.session.under_way()
            self._later.work()

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        """The thread in `coordinate` raises what is raised here."""
        try:
            yield
        except BaseException as e:
            self._failure = e
            self.inbox.put(lambda: None)

    # What executors say

    def guard(self, device: str, message: AnyMessage) -> None:
        self._receiver.guard(device, message)

    def received(self, device: str, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if not isinstance(message, FromExecutor):
            return
        report = message.body
        if isinstance(report, DeviceFailed):
            self.session.failed(device, report.reason, report.fault)
            return
        try:
            if isinstance(report, StateReport):
                if (answer := self._receiver.on_states(report, tensors)) is not None:
                    self.put(device, *answer)
                return
            if not isinstance(report, SecureReport):
                named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                report = self._receiver.on_report(device, report, message.values, named)
        except PeerError as e:
            self.session.refused(device, str(e))
            return
        self.session.heard(device, report)

    def connect(self, device: str, join: JoinRun, channel: MessageChannel) -> None:
        self._channels.append(channel)

        def fail(error: Exception) -> None:
            channel.close()  # its receiving thread reports the loss
            if self.session.is_here(device) and not self.over.is_set():
                self._note(f"executor {device}: {error}")

        if (former := self._senders.get(device)) is not None:
            former.close(0.0)
        self._senders[device] = self._output(channel, fail)
        self._outboxes[device] = Outbox()
        if (hello := self._receiver.hello(device)) is not None:
            self.put(device, hello)
        self.session.joined(device)

    def _output(self, channel: MessageChannel, fail: Callable[[Exception], None]) -> SendLane | MessageSender:
        """Return the way out to an executor. `fail` gets the error of a message that could not be sent."""
        if not self._policy.apart:
            return MessageSender(channel, fail)
        assert isinstance(channel, SocketChannel), "those that are elsewhere connect by sockets"
        return SendLane(channel, timeout_s=self.timeout_s, on_error=fail)

    # What the machine asks

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        if not isinstance(order, PhaseOpened):
            if isinstance(order, TasksGranted):
                self._receiver.settle()  # it will add up where its last sums lie
            self.put(executor, ToExecutor(run=self.run, body=order))
            return
        self._open(order.opening.phase)
        self._server.open(order.opening)
        self._opened = True
        headers, in_shared_memory = headers_of(self._broadcast), self._in_shared_memory
        message = ToExecutor(run=self.run, body=order, in_shared_memory=in_shared_memory, tensors=headers)
        self.put(executor, message, list(self._broadcast.values()))
        self._shown_bytes += sum(h.nbytes for h in in_shared_memory)

    def tell(self, site: str, order: SecureOrder) -> None:
        self.put(site, ToExecutor(run=self.run, body=order))

    def merge(self, executor: str, phase: PhaseId) -> None:
        self._receiver.merge(executor)

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        try:
            return Unmasking(wrong=self._receiver.unmask(recovered))
        except PeerError as e:
            return Unmasking(f"secure aggregation: {e}")

    def ignore(self, executor: str, phase: PhaseId) -> None:
        self._receiver.ignore(executor)

    def dismiss(self, executor: str, reason: str) -> None:
        if (channel := self.acceptor.channel(executor)) is not None:
            channel.close()

    def call(self, device: str) -> None:
        self._names.add(device)
        self.devices.call(device)

    def update_server(self, phase: PhaseId, opening: PhaseSetup | None = None) -> None:
        if opening is not None:
            self._opened_s = time.monotonic() if phase.number == 0 else self._opened_s
            self._server.open(opening)
        self._server.absorb()
        self._receiver.settle()

    def commit(self, record: RoundRecord) -> None:
        if (later := self._committed(record, self._measure())) is not None:
            self._later.put(later)

    def note(self, text: str) -> None:
        self._note(text)

    def finished(self, finish: Finish) -> None:
        for executor in list(self._senders):
            if self.session.is_here(executor):
                self.put(executor, ToExecutor(run=self.run, body=Halt()))
        self.inbox.put(lambda: None)

    def put(self, executor: str, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        outbox, out = self._outboxes[executor], self._senders[executor]
        if isinstance(out, SendLane) and isinstance(content(message), PhaseOpened):
            outbox.put(partial(out.withdraw, PhaseOpened))  # or one that takes nothing would be kept each round's model
        outbox.put(partial(out.put, message, tensors))
        self._unsent.append(outbox)

    def _open(self, phase: PhaseId) -> None:
        if phase == self._phase_id:
            return
        self._receiver.settle()  # of an attempt that was dropped
        if self._phase_id is None or phase.round != self._phase_id.round:
            self._opened_s = time.monotonic()
        notice = self._server.broadcast()
        in_shared_memory = None if self._policy.broadcast_memory is None else self._policy.broadcast_memory.put(notice)
        self._phase_id, self._broadcast, self._in_shared_memory = (
            phase,
            notice if in_shared_memory is None else {},
            in_shared_memory or (),
        )

    def _measure(self) -> RoundMeasure:
        """Since the round before."""
        sent, received = self.bytes()
        sent, received = sent + self._shown_bytes, received + self._receiver.shared_bytes
        counts = (sent, received, self._receiver.trips, self._receiver.value_bytes)
        before, self._counted = self._counted, counts
        sent, received, trips, value_bytes = (now - then for now, then in zip(counts, before, strict=True))
        seconds = time.monotonic() - self._opened_s
        return RoundMeasure(
            seconds=seconds,
            opened_at_s=time.time() - seconds,
            sent_bytes=sent,
            received_bytes=received,
            trips=trips,
            value_bytes=value_bytes,
        )
