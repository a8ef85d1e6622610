"""A device's links to the other stages: one connection, a send lane, a receive lane and credits for each."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from isthmus.accelerators import HOST, DeviceEvent
from isthmus.accelerators.copies import CopyLabel, Fill
from isthmus.errors import PeerError
from isthmus.plans import Packing
from isthmus.protocol.arrivals import StageArrivals
from isthmus.protocol.run_messages import Arrived, Item, Parcel, PartsArrived
from isthmus.runtime.device.copy_streams import CopyStreams, Encode, LinkCopyStreams
from isthmus.runtime.device.fingerprints import Fingerprinter
from isthmus.runtime.device.snapshots import SnapshotReceiver
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.messages.assignment import Assignment, Neighbour, SnapshotMessage, SnapshotPart
from isthmus.runtime.messages.run import Credit, Heartbeat, ToPeer
from isthmus.runtime.transport.channel import SocketChannel, in_host_memory
from isthmus.runtime.transport.lanes import Credits, PackedMessage, QueuedSend, SendLane
from isthmus.runtime.transport.message_sender import start_heartbeats
from isthmus.trace import Span
from isthmus.training.compression import Codec, SampleFeedback, codec_of
from isthmus.training.finite import is_finite
from isthmus.training.layout import TensorHeader, bytes_of, header_of, in_a_row

AVERAGE: Literal["average"] = "average"  # how parts of a sum are called in a trace
Key = tuple[Parcel | Literal["average"], int, int, int, int]
"""Parcel, the other stage, item, micro-batch and -1; of a sum's parts, group and round."""
Signature = tuple[tuple[str, str, tuple[int, ...], Packing | None], ...]
"""Name, dtype, shape and packing of each tensor of a parcel."""


class Expected(NamedTuple):
    """The parcels and parts that may arrive: any other is refused before it is allocated."""

    parcels: Mapping[tuple[Parcel, int], frozenset[Signature]]
    parts: Mapping[tuple[int, int, int], int] = {}  # how many elements of a sum, by group, round and stage


class _Here(NamedTuple):
    """The tensors of a parcel that has arrived."""

    tensors: list[Tensor]
    landed: DeviceEvent | None  # on an accelerator: the event to wait for


class StageLinks:
    """All links of one stage. Arrivals go to `inbox` as events; their tensors wait here until they are taken."""

    def __init__(
        self,
        assignment: Assignment,
        channels: Mapping[int, SocketChannel],
        expected: Expected,
        inbox: queue.SimpleQueue[object],
        spans: Callable[[Span], None],
        snapshot_copies: SnapshotReceiver | None = None,
        ways: CopyStreams | None = None,
        fingerprints: Fingerprinter | None = None,
    ) -> None:
        """`snapshot_copies` takes copies of others' snapshots. With `ways` tensors that are sent lie on an accelerator,
        and those that arrive go there."""
        self._run, self._epoch = assignment.run, assignment.epoch
        self._expected = expected
        self._fingerprints = fingerprints or Fingerprinter(None)
        self._inbox = inbox
        self._spans = spans
        self._snapshot_copies = snapshot_copies or SnapshotReceiver({}, lambda stage, step, taken: None)
        self._tensors: dict[Key, _Here] = {}
        self._numbers: dict[Key, float] = {}
        self._closed = False
        self._ending = threading.Lock()
        self._owed: dict[int, int] = {}
        self._feedback: dict[int, SampleFeedback] = {}
        """Error feedback by the stage to which gradients go; used in the packing thread of its lane alone."""
        self._names = {n.stage: n for n in assignment.neighbours}
        self._arrivals = StageArrivals(
            assignment.view,
            assignment.share,
            {n.stage: n.device for n in assignment.neighbours},
            start_step=assignment.start_step,
            first_item=assignment.first_item,
            lease_ahead=assignment.lease_ahead,
            eval_micro_batches=assignment.eval_micro_batches,
            eval_rest=assignment.eval_rest,
        )
        self._checking = threading.Lock()  # arrivals are checked by the links' threads and by the compute lane
        self._assignment = assignment
        self._channels = dict(channels)
        self._accelerator = HOST if ways is None else ways.accelerator
        self._ways = {} if ways is None else {n.stage: LinkCopyStreams(ways, n.device) for n in assignment.neighbours}
        self._credits = {n.stage: Credits(n.window_bytes) for n in assignment.neighbours}
        self._lanes = {n.stage: self._lane(n) for n in assignment.neighbours}
        self._over = threading.Event()
        # Also over a link that has nothing to carry: one that is cut, or open at one end only, is silent.
        start_heartbeats(self._run, assignment.timeout_s, self._over, self._lanes.values)
        for stage in self._channels:
            threading.Thread(target=self._receive, args=(stage,), name=f"receive {stage}", daemon=True).start()

    def _lane(self, neighbour: Neighbour) -> SendLane:
        def departed(departure: QueuedSend) -> None:
            if isinstance(message := departure.message, ToPeer):
                times = departure.start_s, departure.end_s, departure.size_bytes
                self._record("send", message.body, neighbour, *times, wire_bytes=departure.wire_bytes)

        return SendLane(
            self._channels[neighbour.stage],
            shape=neighbour.shape,
            credits=self._credits[neighbour.stage],
            timeout_s=self._assignment.timeout_s,
            on_departure=departed,
            on_error=self._failed,
        )

    def _record(
        self,
        track: Literal["send", "receive"],
        body: Arrived | PartsArrived,
        other: Neighbour,
        start_s: float,
        end_s: float,
        size_bytes: int,
        *,
        wire_bytes: int = 0,
    ) -> None:
        name, micro_batch = _called(body)
        self._spans(
            Span(
                device=self._assignment.device,
                track=track,
                name=name,
                start_s=start_s,
                end_s=end_s,
                step=body.item,
                micro_batch=micro_batch,
                size_bytes=size_bytes,
                wire_bytes=wire_bytes,
                other=other.device,
            )
        )

    def _failed(self, error: Exception) -> None:
        """Put the error into the inbox: a lane has no caller to raise to. Errors of closed links are ignored."""
        with self._ending:
            if not self._closed:
                self._inbox.put(error)

    def send(
        self,
        target: int,
        body: Arrived,
        tensors: Mapping[str, Tensor],
        packings: Mapping[str, Packing] = {},
        samples: Sequence[int] = (),
        *,
        scale: float = 1.0,
    ) -> None:
        """Hand a parcel to the link's send lane. This is where a micro-batch leaves a device.

        `packings` says by name which tensors are packed on the way, and how. `samples` are those of a micro-batch of
        gradients, which are contiguous where packing with feedback remembers by sample, and by the `scale` of the loss.
        """
        feedback = self._feedback.setdefault(target, SampleFeedback())
        self._fingerprints.sent(body, target, tensors)

        def message(packed: Mapping[str, Packing]) -> ToPeer:
            headers = tuple(header_of(name, t, packed.get(name)) for name, t in tensors.items())
            return ToPeer(run=self._run, body=body, tensors=headers)

        def encode() -> tuple[AnyMessage, list[Tensor]]:
            # No codec takes numbers that are not finite, and the receiver must see them.
            found = message({name: packing for name, packing in packings.items() if is_finite(tensors[name])})
            with_feedback = partial(feedback.encode, samples=samples, scale=scale)
            return found, _encoded(found.tensors, list(tensors.values()), with_feedback)

        self._put(target, message({}), list(tensors.values()), encode, packs=bool(packings))

    def _put(
        self,
        target: int,
        message: ToPeer,
        tensors: Sequence[Tensor],
        encode: Encode,
        *,
        packs: bool = False,
    ) -> None:
        """`message` is as it would be if nothing were packed."""
        packer = None
        if tensors and target in self._ways:
            packer = self._ways[target].lowering(_cargo(message.body), tensors, encode)
        elif packs:
            packer = partial(_packed, encode)
        self._lanes[target].put(message, tensors, packer)

    def send_parts(self, target: int, body: PartsArrived, stretch: Tensor) -> None:
        """Hand a stretch of a sum's buffer to the link's send lane."""
        message = ToPeer(run=self._run, body=body, tensors=(header_of(AVERAGE, stretch),))
        self._put(target, message, [stretch], lambda: (message, [in_a_row(stretch)]))

    def snapshot_copy(self, target: int, message: SnapshotMessage | SnapshotPart, tensors: Sequence[Tensor]) -> None:
        """Hand a stretch of a snapshot to the link's send lane, behind all else."""
        self._lanes[target].put(message, tensors, background=True)

    @property
    def busy(self) -> bool:
        """Return whether something waits to be sent to another stage."""
        return any(lane.busy for lane in self._lanes.values())

    def opened(self, item: Item) -> Item:
        """The coordinator opens an item: this replica's part of it. PeerError for one that none opens, or of which
        something wrong has arrived."""
        with self._checking:
            return self._arrivals.opened(item)

    def reported(self, item: int) -> None:
        with self._checking:
            self._arrivals.reported(item)

    def holds(self, parcel: Parcel, source: int, item: int, micro_batch: int = -1) -> bool:
        return (parcel, source, item, micro_batch, -1) in self._tensors

    def take(self, parcel: Parcel, source: int, item: int, micro_batch: int = -1) -> list[Tensor]:
        """The tensors of a parcel that has arrived; its bytes are granted to the sender again."""
        return self._taken((parcel, source, item, micro_batch, -1))

    def take_parts(self, group: int, turn: int, source: int, item: int) -> Tensor:
        """Take the tensor that a stage of another replica sent in this round of a sum."""
        return self._taken((AVERAGE, source, item, group, turn))[0]

    def _taken(self, key: Key) -> list[Tensor]:
        (tensors, landed), source = self._tensors.pop(key), key[1]
        if landed is not None:
            self._accelerator.wait(landed)
            for tensor in tensors:
                self._accelerator.used_here(tensor)
        owed = self._owed.get(source, 0) + sum(t.numel() * t.element_size() for t in tensors)
        if 4 * owed >= self._names[source].window_bytes:
            self._lanes[source].put(Credit(run=self._run, size_bytes=owed))
            owed = 0
        self._owed[source] = owed
        return tensors

    def take_number(self, parcel: Parcel, source: int, item: int) -> float:
        self._tensors.pop((parcel, source, item, -1, -1))
        return self._numbers.pop((parcel, source, item, -1, -1))

    def _receive(self, stage: int) -> None:
        """The receive lane of one link. This is where a micro-batch enters a device."""
        channel = self._channels[stage]
        idle_s = None  # who has not begun may still be waiting for its weights: the coordinator knows
        try:
            while (received := channel.receive(self._guard, idle_s, partial(self._land, stage))) is not None:
                idle_s = self._assignment.timeout_s
                self._accept(stage, channel, *received)
                del received  # while it waits, the link must not keep tensors alive
            raise PeerError(f"{channel.other}: closed the link")
        except Exception as e:
            self._failed(e)

    def _land(self, stage: int, message: AnyMessage, fill: Fill) -> list[Tensor]:
        if stage not in self._ways or not message.tensors or not isinstance(message, ToPeer):
            return in_host_memory(message, fill)
        return self._ways[stage].land(_cargo(message.body), message.tensors, fill)

    def _accept(self, stage: int, channel: SocketChannel, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if isinstance(message, Credit):
            self._credits[stage].give(message.size_bytes)
            return
        if isinstance(message, Heartbeat):
            return
        body = content(message)
        known = isinstance(body, Arrived | PartsArrived | SnapshotMessage | SnapshotPart)
        if not known or body.source != stage:
            raise PeerError(f"{channel.other}: sent {type(body).__name__} on the link of stage {stage}")
        if body.epoch != self._epoch:
            return
        with self._checking:
            if isinstance(body, SnapshotMessage | SnapshotPart):
                self._arrivals.copied(stage, body.step)
            else:
                self._arrivals.arrived(body)
        if isinstance(body, SnapshotMessage | SnapshotPart):
            self._snapshot_copies.accept(body, tensors)
            return
        self._keep(body, tensors)
        if isinstance(body, Arrived) and self._fingerprints.on:
            with self._ways[stage].landing() if stage in self._ways else contextlib.nullcontext():
                self._fingerprints.received(body, {h.name: t for h, t in zip(message.tensors, tensors, strict=True)})
        size_bytes = sum(h.nbytes for h in message.tensors)
        self._record("receive", body, self._names[stage], channel.began_s, time.monotonic(), size_bytes)
        self._inbox.put(body)

    def _keep(self, body: Arrived | PartsArrived, tensors: Sequence[Tensor]) -> None:
        landed = self._ways[body.source].landed if tensors and body.source in self._ways else None
        here = _Here(list(tensors), landed)
        if isinstance(body, PartsArrived):
            self._tensors[AVERAGE, body.source, body.item, body.group, body.round] = here
        else:
            key = (body.parcel, body.source, body.item, body.micro_batch, -1)
            self._tensors[key] = here
            self._numbers[key] = body.number

    def _guard(self, message: AnyMessage) -> None:
        if message.run != self._run:
            raise PeerError(f"a frame of run {message.run!r} arrived, expected {self._run!r}")
        body = content(message)
        if isinstance(body, Arrived):
            signature = tuple((h.name, h.dtype, h.shape, h.packing) for h in message.tensors)
            expected = self._expected.parcels.get((body.parcel, body.source), frozenset[Signature]())
            if not any(_fits(signature, wanted) for wanted in expected):
                raise PeerError(f"stage {body.source} sent {body.parcel} {signature}, not in the plan")
        elif isinstance(body, PartsArrived):
            where = (body.group, body.round, body.source)
            stated = [(h.dtype, h.shape) for h in message.tensors]
            if stated != [("float32", (self._expected.parts.get(where, -1),))]:
                raise PeerError(f"stage {body.source} sent parts {where} as {stated}, not in the plan")
        elif isinstance(message, SnapshotMessage | SnapshotPart):
            if message.epoch != self._epoch:
                raise PeerError(f"stage {message.source} sent a snapshot of plan epoch {message.epoch}")
            self._snapshot_copies.guard(message)
        elif message.tensors:
            raise PeerError(f"{type(body).__name__} with tensors on a link between stages")

    def reshape(self, step: int) -> None:
        """Emulation: links are from now on as they are in this step."""
        for neighbour in self._assignment.neighbours:
            for since, shape in neighbour.later:
                if since <= step:
                    self._lanes[neighbour.stage].reshape(shape)

    def hold(self) -> None:
        """Let the accelerator's work from now on wait for the copies to the host so far: it may overwrite their
        sources."""
        for ways in self._ways.values():
            ways.down.hold()

    def drain(self) -> None:
        """Wait until everything sent so far has left this device: only then is its departure on record."""
        for lane in self._lanes.values():
            lane.drain()
        for ways in self._ways.values():
            ways.down.tell()
            ways.up.tell()

    def close(self) -> None:
        """At the end of a run: what was handed over is sent."""
        self._end(5.0)

    def abandon(self) -> None:
        """In the middle of a run whose plan is given up."""
        self._end(0.0)

    def _end(self, flush_s: float) -> None:
        with self._ending:
            self._closed = True
        self._over.set()
        self._fingerprints.close()
        for lane in self._lanes.values():
            lane.close(flush_s)
        for channel in self._channels.values():
            channel.close()


def _fits(signature: Signature, expected: Signature) -> bool:
    """Return whether it is the expected one, in which each tensor may come as it is: what is not finite is not
    packed."""
    return len(signature) == len(expected) and all(
        got[:3] == wanted[:3] and got[3] in (None, wanted[3]) for got, wanted in zip(signature, expected, strict=True)
    )


def _called(body: Arrived | PartsArrived) -> tuple[str, int]:
    """Name and micro-batch of a span."""
    return (AVERAGE, -1) if isinstance(body, PartsArrived) else (body.parcel, body.micro_batch)


class _WithFeedback(Protocol):
    def __call__(self, codec: Codec, *, gradient: Tensor, name: str) -> Tensor: ...


def _cargo(body: Arrived | PartsArrived) -> CopyLabel:
    name, micro_batch = _called(body)
    return CopyLabel(name, body.item, micro_batch)


def _packed(encode: Encode) -> PackedMessage:
    message, flats = encode()
    return PackedMessage(message, [bytes_of(flat) for flat in flats])


def _encoded(headers: Sequence[TensorHeader], tensors: Sequence[Tensor], with_feedback: _WithFeedback) -> list[Tensor]:
    """A parcel's tensors as they are sent, flat, where they lie. UserError for a value that cannot be packed."""
    found: list[Tensor] = []
    for header, tensor in zip(headers, tensors, strict=True):
        if header.packing is None:
            found.append(in_a_row(tensor))
            continue
        codec = codec_of(header.packing)
        if header.packing.feedback:
            found.append(with_feedback(codec, gradient=tensor, name=header.name))
        else:
            found.append(codec.encode(in_a_row(tensor), header.name))
    return found
