"""The merger's process: receives from replicas, lets the machine decide, merges, sends to each as its link allows."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.protocol.decoupled import Merger
from isthmus.protocol.decoupled_delivery import Delivery
from isthmus.protocol.decoupled_events import (
    NEVER,
    CollectChanges,
    Contributed,
    FinishMerges,
    FragmentSent,
    LastStepMade,
    MergeChanges,
    MergedFragment,
    StepsMade,
)
from isthmus.protocol.decoupled_growth import FragmentGrowth
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.runtime.decoupled.outgoing import Outgoing, OutgoingLink
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.decoupled import FromReplica, ReplicaNote, ToReplica
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.message_sender import start_heartbeats
from isthmus.sanitize import sanitize
from isthmus.session.failures import CLOSED
from isthmus.training.compression import Codec
from isthmus.training.decoupled import MergedFragments, size_of
from isthmus.training.layout import header_of

POLL_S = 0.2
"""Between looks at processes that may have ended."""
HALT_S = 5.0
"""For the last message to a replica."""


@dataclass(frozen=True, kw_only=True)
class MergerWatch:
    """Callbacks, in the merger's thread."""

    stepped: Callable[[str, StepsMade, int, float], None]
    """Replica, step, samples of all replicas so far, seconds since the run began."""
    merged: Callable[[MergeChanges, float], None]
    note: Callable[[str], None]


class _ReplicaLink:
    """One replica's connection, and the messages that wait for it."""

    def __init__(self, run: str, merged: MergedFragments, lock: threading.Lock, shape: Link | None) -> None:
        """The `lock` is held while versions change, and while it is decided what is sent."""
        fragments = len(merged.known)
        self.delivery = Delivery(fragments)
        self.outgoing: OutgoingLink | None = None
        self._connections = 0
        self.changes: dict[int, Tensor] = {}
        """The payload of each fragment's newest change."""
        self._run, self._merged, self._lock, self._shape = run, merged, lock, shape
        self._heartbeats = 0
        self._first: Outgoing | None = None
        self.sent_bytes = self.plain_bytes = self.whole_bytes = 0
        """Bytes of changes, of these as float32, and of fragments that are sent whole."""
        for fragment in range(fragments):
            self.delivery.publish(fragment, 0, 0)

    def connect(self, channel: SocketChannel, first: Outgoing | None) -> None:
        """From now on over this channel, and no other; `first` is sent before all else."""
        with self._lock:
            self.delivery.restart()
            self._first = first
            self._connections += 1
        if self.outgoing is not None:
            self.outgoing.finish(0.0)
        self.outgoing = OutgoingLink(channel, self._shape, partial(self._following, self._connections))

    def wake(self) -> None:
        if self.outgoing is not None:
            self.outgoing.wake()

    def put(self, message: Heartbeat, /) -> None:
        """As other senders of heartbeats: one that waits is enough."""
        self._heartbeats = 1
        self.wake()

    def ask(self, order: CollectChanges | Halt) -> None:
        with self._lock:
            self.delivery.ask(order)
        self.wake()

    def halt(self, *, newest_first: bool) -> None:
        with self._lock:
            self.delivery.halt(Halt(), newest_first=newest_first)
        self.wake()

    def _following(self, connection: int) -> Outgoing | None:
        """In the link's thread; nothing for that of an earlier connection. Versions are never changed in place: they
        may be sent without the lock."""
        tensors: list[Tensor] = []
        with self._lock:
            if connection != self._connections:
                return None
            first, self._first = self._first, None
            order = self.delivery.next() if first is None else None
            if isinstance(order, FragmentSent):
                tensors = [self._merged.known[order.fragment] if order.whole else self.changes[order.fragment]]
        if first is not None:
            return first
        if order is None:
            beats, self._heartbeats = self._heartbeats, 0
            return (Heartbeat(run=self._run), []) if beats else None
        headers = tuple(header_of("fragment", tensor) for tensor in tensors)
        if isinstance(order, FragmentSent):
            size_bytes, plain_bytes = tensors[0].nbytes, self._merged.known[order.fragment].nbytes
            if order.whole:
                self.whole_bytes += size_bytes
            else:
                self.sent_bytes += size_bytes
                self.plain_bytes += plain_bytes
        return ToReplica(run=self._run, body=order, tensors=headers), tensors


class MergerHost:
    """The merger's port over TCP. `coordinate` returns when the run is over."""

    def __init__(
        self,
        machine: Merger,
        merged: MergedFragments,
        codec: Codec,
        links: Mapping[str, Link | None],
        run: str,
        timeout_s: float,
        watch: MergerWatch,
        *,
        begin: Callable[[str], Outgoing] | None = None,
        final_s: float | None = None,
    ) -> None:
        """`links` are those of all replicas, emulated or None; `codec` is that of their payloads. `begin` is what a
        replica is sent first, where it does not know the job: then it may come again after it has failed. `final_s`:
        how long replicas may take to receive the merged model at the end; None: they do not get it."""
        self._machine, self._merged, self._codec = machine, merged, codec
        machine.port = self
        self._run, self._timeout_s, self._watch = run, timeout_s, watch
        self._begin, self._final_s = begin, final_s
        self._lock = threading.Lock()
        self._links = {name: _ReplicaLink(run, merged, self._lock, shape) for name, shape in links.items()}
        self._events: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
        self._deltas: list[dict[str, Tensor]] = [{} for _ in range(machine.rules.fragments)]
        """That are not merged yet, by fragment and replica."""
        self._growth = [FragmentGrowth(size_of(values)) for values in merged.known]
        self._unlike: dict[str, str] = {}
        """Replicas that are to be left out for a change that was not merged, and why."""
        self.received_bytes = self._plain_bytes = 0
        """Bytes of contributions, and of these as float32."""
        self._began_s = time.monotonic()
        self._finish: FinishMerges | None = None
        self._gone: set[str] = set()
        """Replicas that have ended otherwise than well."""
        self._left_out: set[str] = set()
        """Those that sent what no replica can have done: they do not come back."""
        self.acceptor = Acceptor(run, list(links), on_message=self._events.put, guard=self._guard, timeout_s=timeout_s)

    @property
    def sent_bytes(self) -> int:
        """Bytes of changes that were sent, to all replicas."""
        return sum(link.sent_bytes for link in self._links.values())

    @property
    def whole_bytes(self) -> int:
        """Bytes of fragments that were sent whole."""
        return sum(link.whole_bytes for link in self._links.values())

    @property
    def plain_bytes(self) -> int:
        """Bytes of changes both ways, if they were sent as float32."""
        return self._plain_bytes + sum(link.plain_bytes for link in self._links.values())

    def coordinate(self, ended: Callable[[], Mapping[str, str]], stopped: Callable[[], bool]) -> FinishMerges:
        """`ended` names processes that have ended other than well, and how; `stopped` says that somebody wants the run
        to end."""
        over = threading.Event()
        start_heartbeats(self._run, self._timeout_s, over, lambda: list(self._links.values()))
        noted: set[str] = set()
        stopping = False
        try:
            while self._finish is None:
                self._machine.clock(self.now_s)
                if stopped() and not stopping:
                    stopping = True
                    self._machine.stop()
                for name, how in ended().items():
                    if name not in noted:
                        noted.add(name)
                        self._gone.add(name)
                        self._watch.note(f"{name}: {how}")
                if len(self._gone) == len(self._links) and not self._machine.connected:
                    self._finish = FinishMerges("lost", "every replica's process has ended")
                self._receive()
                while self._unlike:
                    self._leave_out(*self._unlike.popitem())
            return self._finish
        finally:
            over.set()
            self._end()

    @property
    def now_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began_s

    def _receive(self) -> None:
        due_s = self._machine.due_s
        wait_s = POLL_S if due_s is None else min(POLL_S, max(0.0, due_s - self.now_s))
        try:
            received = self._events.get(timeout=wait_s)
        except queue.Empty:
            return
        self._machine.clock(self.now_s)
        self._on_message(*received)

    def _on_message(self, replica: str, message: AnyMessage | Exception | None, tensors: list[Tensor]) -> None:
        if isinstance(message, JoinRun):
            self._join(replica)
            return
        if replica not in self._machine.connected:  # received before it was lost
            return
        match message:
            case FromReplica(body=DeviceFailed(reason=reason)):
                if self._begin is None:
                    self._gone.add(replica)
                self._lost(replica, sanitize(reason))
            case FromReplica(body=(StepsMade() | Contributed()) as body) if refused := self._refusal(replica, body):
                self._leave_out(replica, refused)
            case FromReplica(body=StepsMade() as body):
                self._machine.heard(replica, body)
                self._watch.stepped(replica, body, self._machine.samples, self.now_s)
            case FromReplica(body=Contributed() as body):
                self._contributed(replica, body, tensors)
            case FromReplica(body=ReplicaNote(text=text)):
                self._watch.note(f"{replica}: {sanitize(text)}")
            case FromReplica(body=LastStepMade() as body):
                self._machine.heard(replica, body)
            case Heartbeat():
                pass
            case _:
                self._lost(replica, str(message) if message is not None else CLOSED)

    def _refusal(self, replica: str, body: StepsMade | Contributed) -> str:
        """Why it is not taken; empty if it is."""
        try:
            self._machine.check(replica, body)
        except PeerError as e:
            return str(e)
        return ""

    def _leave_out(self, replica: str, reason: str) -> None:
        self._gone.add(replica)
        self._left_out.add(replica)
        if self._finish is None and replica in self._machine.connected:
            self._lost(replica, reason)
        else:
            self._watch.note(f"{replica} is left out: {reason}")

    def _join(self, replica: str) -> None:
        if replica in self._left_out:
            self.acceptor.forget(replica)
            return
        try:
            channel = self.acceptor.channel(replica)
        except KeyError:  # it is gone already
            return
        assert isinstance(channel, SocketChannel), "replicas are reached over sockets"
        self._links[replica].connect(channel, self._begin(replica) if self._begin is not None else None)
        self._machine.joined(replica)

    def _lost(self, replica: str, reason: str) -> None:
        self.acceptor.forget(replica)
        self._machine.lost(replica, reason)

    def release(self, replica: str) -> None:
        """Have a replica contribute all that it has, and end. In the thread of `coordinate`."""
        self._machine.released(replica)

    def _contributed(self, replica: str, body: Contributed, tensors: list[Tensor]) -> None:
        deltas: dict[int, Tensor] = {}
        for fragment, payload in zip(body.fragments, tensors, strict=True):
            try:
                delta = self._merged.unpacked(fragment, payload, self._codec)
            except PeerError as e:
                self._leave_out(replica, str(e))
                return
            if delta is None:
                self._leave_out(replica, f"its change of fragment {fragment} is not finite")
                return
            deltas[fragment] = delta
            self.received_bytes, self._plain_bytes = (
                self.received_bytes + payload.nbytes,
                self._plain_bytes + delta.nbytes,
            )
        for fragment, delta in deltas.items():
            self._deltas[fragment][replica] = delta
        self._machine.heard(replica, body)

    def _guard(self, replica: str, message: AnyMessage) -> None:
        """In the connection's thread: PeerError for a message whose tensors must not be received."""
        if isinstance(message, Heartbeat):
            return
        if not isinstance(message, FromReplica):
            raise PeerError(f"sent {type(message).__name__}, expected steps and contributions")
        sizes = [tensor.nbytes for tensor in message.tensors]
        most: list[int] = []
        if isinstance(message.body, Contributed):
            known, fragments = self._merged.known, message.body.fragments
            if any(fragment >= len(known) for fragment in fragments) or len(fragments) != len(message.body.samples):
                raise PeerError(f"contributed to fragments {list(fragments)}, expected some of {len(known)}")
            if not all(message.body.samples):
                raise PeerError("contributed without a step")
            most = [self._codec.wire_bytes(known[f].numel(), known[f].dtype) for f in fragments]
        if len(sizes) != len(most) or any(size > limit for size, limit in zip(sizes, most, strict=True)):
            raise PeerError(f"sent tensors of {sizes} bytes, expected at most {most}")

    # What the merger asks

    def ask(self, replica: str, collect: CollectChanges) -> None:
        self._links[replica].ask(collect)

    def let_go(self, replica: str) -> None:
        self._links[replica].ask(Halt())

    def send_all(self, replica: str) -> None:
        self._links[replica].wake()

    def note(self, text: str) -> None:
        self._watch.note(text)

    def finished(self, finish: FinishMerges) -> None:
        self._finish = finish

    def merge(self, merge: MergeChanges) -> None:
        admitted = tuple(found for merged in merge.fragments if (found := self._admitted(merged)).contributions)
        merge = msgspec.structs.replace(merge, fragments=admitted)
        for merged in admitted:
            fragment, own = merged.fragment, self._deltas[merged.fragment]
            numbers = {contribution.replica: contribution.number for contribution in merged.contributions}
            deltas = [(own.pop(c.replica), c.samples) for c in merged.contributions]
            with self._lock:
                change = self._merged.merge(fragment, deltas)
                for name, link in self._links.items():
                    link.changes[fragment] = change
                    link.delivery.publish(fragment, merge.merge, merge.samples, numbers.get(name, NEVER))
        for link in self._links.values():
            link.wake()
        self._watch.merged(merge, self.now_s)

    def _admitted(self, merged: MergedFragment) -> MergedFragment:
        """Without contributions of replicas that are left out, or are to be: they make the weights too large."""
        fragment, own = merged.fragment, self._deltas[merged.fragment]
        given = [c for c in merged.contributions if c.replica not in {*self._left_out, *self._unlike}]
        changes = {c.replica: (size_of(own[c.replica]), c.samples) for c in given}
        unlike = self._growth[fragment].unlike_others(size_of(self._merged.known[fragment]), changes)
        for replica, times in unlike.items():
            size, samples = changes[replica]
            than = f"{times:.3g} times as much for each sample as others" if math.isfinite(times) else "others of 0"
            self._unlike[replica] = (
                f"its change of fragment {fragment} has a root mean square of {size:.3g} after {samples} samples, "
                f"{than}: the merged weights would be too large"
            )
        kept = tuple(c for c in given if c.replica not in unlike)
        self._deltas[fragment] = {c.replica: own[c.replica] for c in kept}
        return msgspec.structs.replace(merged, contributions=kept)

    def _wait_for_hang_ups(self, deadline_s: float) -> None:
        """A replica hangs up when it has received the end. One that comes back meanwhile receives it too."""
        connected = set(self._machine.connected)
        while connected and (left_s := deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                replica, message, _ = self._events.get(timeout=left_s)
                if isinstance(message, JoinRun):
                    self._join(replica)
                    if replica not in self._left_out:
                        connected.add(replica)
                        self._links[replica].wake()  # the machine is over, and says nothing more
                elif message is None or isinstance(message, Exception):
                    connected.discard(replica)

    def _end(self) -> None:
        for link in self._links.values():
            link.halt(newest_first=self._final_s is not None)
        deadline_s = time.monotonic() + (HALT_S if self._final_s is None else self._final_s)
        if self._final_s is not None:
            self._wait_for_hang_ups(deadline_s)
        for link in self._links.values():
            if link.outgoing is not None:
                link.outgoing.finish(max(0.0, deadline_s - time.monotonic()))
        self.acceptor.close()
