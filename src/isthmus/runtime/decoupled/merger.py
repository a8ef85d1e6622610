"""The merger's process: receives from replicas, lets the machine decide, merges, sends to each as its link allows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.programs.merger import Merger
from isthmus.programs.merging import Finish
from isthmus.protocol.decoupled_events import (
    NEVER,
    CollectChanges,
    Contributed,
    Delivery,
    FragmentGrowth,
    FragmentSent,
    MergeChanges,
    MergedFragment,
    StepsMade,
)
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.decoupled import FromReplica, ReplicaNote, ToReplica
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.session_host import SessionHost
from isthmus.runtime.transport.channel import MessageChannel, SocketChannel
from isthmus.runtime.transport.lanes import Outgoing, QueuedSend, SendLane
from isthmus.sanitize import sanitize
from isthmus.training.compression import Codec
from isthmus.training.decoupled import MergedFragments, size_of
from isthmus.training.layout import header_of

HALT_S = 5.0  # for the last message to a replica


@dataclass(frozen=True, kw_only=True)
class MergerWatch:
    """Callbacks in the merger's thread, and what replicas that join are asked and sent."""

    stepped: Callable[[str, StepsMade, int, float], None]
    """Replica, step, samples of all replicas so far, seconds since the run began."""
    merged: Callable[[MergeChanges, float], None]
    note: Callable[[str], None]
    begin: Callable[[str], Outgoing | None] = lambda _: None
    """The message that a replica is sent first, where it does not know the job."""
    has_data: Callable[[str], bool] = lambda _: True  # whether a device can train


@dataclass
class MergeTraffic:
    """Traffic between the merger and all replicas."""

    sent_bytes: int = 0  # bytes of changes that were sent
    received_bytes: int = 0  # bytes of contributions
    plain_bytes: int = 0  # bytes of both, if they were sent as float32
    whole_bytes: int = 0  # bytes of fragments that were sent whole: to a replica that begins, or missed a change


class _ReplicaLink:
    """One replica's connection, and the messages that wait for it."""

    def __init__(
        self,
        run: str,
        merged: MergedFragments,
        delivery: Delivery,
        traffic: MergeTraffic,
        lock: threading.Lock,
        shape: Link | None,
        left: Callable[[QueuedSend], None],
    ) -> None:
        """The `lock` is held while versions and `traffic` change, and while it is decided what is sent. `left` gets
        each message that has left, in the link's thread."""
        self.delivery = delivery
        self.outgoing: SendLane | None = None
        self._connections = 0
        self.changes: dict[int, Tensor] = {}  # the payload of each fragment's newest change
        self._run, self._merged, self._traffic, self._lock, self._shape = run, merged, traffic, lock, shape
        self._left = left
        self._heartbeats = 0
        self._first: Outgoing | None = None

    def connect(self, channel: SocketChannel, first: Outgoing | None) -> None:
        """From now on over this channel, and no other; `first` is sent before all else."""
        with self._lock:
            self.delivery.restart()
            self._first = first
            self._connections += 1
        if self.outgoing is not None:
            self.outgoing.close(0.0)
        following = partial(self._following, self._connections)
        self.outgoing = SendLane(
            channel,
            shape=self._shape,
            following=following,
            on_departure=self._left,
            on_error=lambda _: channel.close(),
        )

    def wake(self) -> None:
        if self.outgoing is not None:
            self.outgoing.wake()

    def put(self, message: Heartbeat, /) -> None:
        """Put a heartbeat, as other senders do: one that waits is enough."""
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
                known = self._merged.known[order.fragment]
                tensors = [known if order.whole else self.changes[order.fragment]]
                if order.whole:
                    self._traffic.whole_bytes += known.nbytes
                else:
                    self._traffic.sent_bytes += tensors[0].nbytes
                    self._traffic.plain_bytes += known.nbytes
        if first is not None:
            return first
        if order is None:
            beats, self._heartbeats = self._heartbeats, 0
            return (Heartbeat(run=self._run), []) if beats else None
        headers = tuple(header_of("fragment", tensor) for tensor in tensors)
        return ToReplica(run=self._run, body=order, tensors=headers), tensors


class MergerHost(SessionHost[Merger]):
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
    ) -> None:
        """`links` are those of all replicas, emulated or None; `codec` is that of their payloads."""
        super().__init__(machine, run, list(links), timeout_s=timeout_s)
        machine.port = self
        self._merged, self._codec, self._watch = merged, codec, watch
        self._lock = threading.Lock()
        self.traffic = MergeTraffic()
        self._links = {
            name: _ReplicaLink(
                run,
                merged,
                Delivery(len(merged.known), machine.begun),
                self.traffic,
                self._lock,
                shape,
                partial(self._left, name),
            )
            for name, shape in links.items()
        }
        self._at_hand: Sequence[Tensor] = ()  # the changes of the contribution that the machine hears of
        self._deltas: list[dict[str, Tensor]] = [{} for _ in range(machine.rules.fragments)]
        """Changes that are not merged yet, by fragment and replica."""
        self._growth = [FragmentGrowth(size_of(values)) for values in merged.known]
        self._began_s = time.monotonic()

    def coordinate(self, devices: DevicesAtWork | None = None, stop: Stop | None = None) -> Finish:
        """Run to the end, as `drive` does. `stop` ends the run with what replicas have."""
        self.drive(devices, stop)
        assert self.session.finish is not None, "it is over"
        return self.session.finish

    @property
    def now_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began_s

    def close(self) -> None:
        self.over.set()
        self._halt()
        deadline_s = time.monotonic() + HALT_S
        for link in self._links.values():
            if link.outgoing is not None:
                link.outgoing.close(max(0.0, deadline_s - time.monotonic()))
        super().close()

    def _halt(self) -> None:
        for link in self._links.values():
            link.halt(newest_first=self.session.final_s is not None)

    def _left(self, replica: str, queued: QueuedSend) -> None:
        """In the link's thread."""
        if isinstance(queued.message, ToReplica) and isinstance(body := queued.message.body, FragmentSent):
            self.session.trace.sent(replica, body, queued.start_s, queued.end_s, queued.size_bytes)

    def takes_offer(self, device: str) -> bool:
        return self._watch.has_data(device)

    # What replicas say

    def receivers(self) -> Iterable[_ReplicaLink]:
        return self._links.values()

    def connect(self, device: str, join: JoinRun, channel: MessageChannel) -> None:
        assert isinstance(channel, SocketChannel), "replicas are reached over sockets"
        self._links[device].connect(channel, self._watch.begin(device))
        self.session.joined(device)

    def received(self, device: str, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if not isinstance(message, FromReplica):
            return
        match message.body:
            case DeviceFailed(reason=reason, fault=fault):
                self.session.failed(device, sanitize(reason), fault)
            case ReplicaNote(text=text):
                self._watch.note(f"{device}: {sanitize(text)}")
            case body:
                self._at_hand = tensors
                self.session.heard(device, body)

    def guard(self, device: str, message: AnyMessage) -> None:
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

    def stepped(self, replica: str, made: StepsMade) -> None:
        self._watch.stepped(replica, made, self.session.samples, self.now_s)

    def reject(self, device: str, *, permanent: bool) -> None:
        self.acceptor.forget(device, permanent=permanent)

    def note(self, text: str) -> None:
        self._watch.note(text)

    def ended(self, reason: str) -> None:
        self._halt()

    def admit(self, replica: str, body: Contributed) -> int:
        deltas: list[Tensor] = []
        for fragment, payload in zip(body.fragments, self._at_hand, strict=True):
            if (delta := self._merged.unpacked(fragment, payload, self._codec)) is None:
                raise PeerError(f"its change of fragment {fragment} is not finite")
            deltas.append(delta)
            with self._lock:
                self.traffic.received_bytes += payload.nbytes
                self.traffic.plain_bytes += delta.nbytes
        for fragment, delta in zip(body.fragments, deltas, strict=True):
            self._deltas[fragment][replica] = delta
        return sum(payload.nbytes for payload in self._at_hand)

    def merge(self, merge: MergeChanges) -> Mapping[str, str]:
        refused: dict[str, str] = {}
        admitted = tuple(f for merged in merge.fragments if (f := self._admitted(merged, refused)).contributions)
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
        return refused

    def _admitted(self, merged: MergedFragment, refused: dict[str, str]) -> MergedFragment:
        """Without contributions of replicas that are refused. Those that make the weights too large become so."""
        fragment, own = merged.fragment, self._deltas[merged.fragment]
        given = [c for c in merged.contributions if c.replica not in refused]
        changes = {c.replica: (size_of(own[c.replica]), c.samples) for c in given}
        unlike = self._growth[fragment].unlike_others(size_of(self._merged.known[fragment]), changes)
        for replica, times in unlike.items():
            size, samples = changes[replica]
            than = f"{times:.3g} times as much for each sample as others" if math.isfinite(times) else "others of 0"
            refused[replica] = (
                f"its change of fragment {fragment} has a root mean square of {size:.3g} after {samples} samples, "
                f"{than}: the merged weights would be too large"
            )
        kept = tuple(c for c in given if c.replica not in unlike)
        self._deltas[fragment] = {name: delta for name, delta in own.items() if name not in refused}
        return msgspec.structs.replace(merged, contributions=kept)
