"""Links between devices: who gets in, what is let through, and who is named when it is not."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.plans import Packing
from isthmus.protocol.run_messages import Arrived, Parcel
from isthmus.runtime.device.links import Expected, StageLinks
from isthmus.runtime.device.peer_connections import PeerConnections
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import Neighbour
from isthmus.runtime.messages.run import Credit, Heartbeat, Hello, ToPeer
from isthmus.runtime.transport.channel import SocketChannel, dial, frame
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.rendezvous import PeerDialer
from isthmus.trace import Span
from isthmus.training.compression import codec_of
from isthmus.training.layout import bytes_of, header_of, pack

from .wire import assignment

RUN = "secret"
X = torch.arange(12.0).reshape(3, 4)
EXPECTED = Expected({("forward", 0): frozenset({(("x:0", "float32", (3, 4), None),)})})


def _parcel(parcel: Parcel) -> Arrived:
    return Arrived(parcel=parcel, source=1, item=3, micro_batch=1)


def _neighbour(stage: int, port: int, window_bytes: int = 1 << 20) -> Neighbour:
    return Neighbour(stage=stage, device=f"d{stage}", host="127.0.0.1", port=port, window_bytes=window_bytes)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", timeout_s=5.0)
    yield made
    made.close()


def _plain(timeout_s: float) -> PeerDialer:
    return PeerDialer(coordinator=("127.0.0.1", 0), identity=None, timeout_s=timeout_s)


def _connecting(listener: Listener, timeout_s: float = 5.0) -> queue.SimpleQueue[object]:
    """Stage 1 waits for stage 0; the queue gets what `connect` returned or raised."""
    result: queue.SimpleQueue[object] = queue.SimpleQueue()
    told = assignment("d1", stage=1, neighbours=(_neighbour(0, 1),), timeout_s=timeout_s)

    def work() -> None:
        try:
            result.put(PeerConnections(listener, RUN, _plain(timeout_s)).connect(told))
        except PeerError as e:
            result.put(e)

    threading.Thread(target=work, daemon=True).start()
    return result


def test_unknown_peers_do_not_get_in(listener: Listener) -> None:
    result = _connecting(listener)
    port = listener.port
    unknown_peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    messages: list[AnyMessage] = [
        Hello(run="guessed", stage=0),
        Hello(run=RUN, stage=7),
        Hello(run=RUN, stage=1),
        Heartbeat(run=RUN),
    ]
    for unknown_peer, message in zip(unknown_peers, messages, strict=False):  # the last one says nothing at all
        unknown_peer.sendall(b"".join(frame(message, [])))
    garbage = socket.create_connection(("127.0.0.1", port))
    garbage.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
    told = assignment("d0", stage=0, neighbours=(_neighbour(1, port),))
    mine = PeerConnections(Listener("127.0.0.1"), RUN, _plain(5.0)).connect(told)
    found = result.get(timeout=60)
    assert isinstance(found, dict) and list(found) == [0] and list(mine) == [1]
    found[0].send(Heartbeat(run=RUN))
    received = mine[1].receive(idle_s=5)
    assert received is not None and isinstance(received[0], Heartbeat)


def test_a_neighbour_that_does_not_come_is_named(listener: Listener) -> None:
    found = _connecting(listener, timeout_s=0.3).get(timeout=60)
    assert isinstance(found, PeerError) and str(found) == "device 'd0': did not connect for 0.3 s"


class Ends:
    """Stage 1's links, and the raw channel of what plays stage 0."""

    def __init__(self, window_bytes: int = 1 << 20, expected: Expected = EXPECTED, timeout_s: float = 60.0) -> None:
        a, b = socket.socketpair()
        self.other = SocketChannel(a, "device 'd1'", 5.0)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.spans: list[Span] = []
        told = assignment("d1", stage=1, neighbours=(_neighbour(0, 1, window_bytes),), timeout_s=timeout_s)
        channels = {0: SocketChannel(b, "device 'd0'", 5.0)}
        self.links = StageLinks(told, channels, expected, self.inbox, self.spans.append)

    def send(self, tensors: Mapping[str, Tensor], **changes: object) -> None:
        headers = tuple(header_of(name, t) for name, t in tensors.items())
        fields: dict[str, object] = {"parcel": "forward", "source": 0, "item": 0, "micro_batch": 0}
        run = changes.pop("run", RUN)
        message = ToPeer(run=run, body=Arrived(**{**fields, **changes}), tensors=headers)  # type: ignore[arg-type]
        self.other.send(message, [pack(t) for t in tensors.values()])


def test_a_link_that_was_alive_and_is_silent_is_lost() -> None:
    """As one that is cut is, or open at one end only."""
    ends = Ends(timeout_s=0.3)
    with pytest.raises(queue.Empty):
        ends.inbox.get(timeout=0.8)  # who has not begun may still wait for its weights
    received = ends.other.receive(idle_s=5)
    assert received is not None and isinstance(received[0], Heartbeat), "our own end is heard of"
    ends.other.send(Heartbeat(run=RUN))
    found = ends.inbox.get(timeout=60)
    assert isinstance(found, PeerError) and str(found) == "device 'd0': silent for 0.3 s"


def test_a_parcel_arrives_with_its_bits_and_strides() -> None:
    ends = Ends()
    ends.send({"x:0": X})
    assert ends.inbox.get(timeout=60) == Arrived(parcel="forward", source=0, item=0, micro_batch=0)
    assert ends.links.holds("forward", 0, 0, 0) and not ends.links.holds("forward", 0, 1, 0)
    (taken,) = ends.links.take("forward", 0, 0, 0)
    assert torch.equal(taken, X) and taken.stride() == X.stride()
    (span,) = ends.spans
    assert (span.track, span.name, span.other, span.size_bytes) == ("receive", "forward", "d0", 48)
    ends.links.close()


def test_what_is_taken_is_granted_again() -> None:
    ends = Ends(window_bytes=4 * 48)
    for number in range(2):
        ends.send({"x:0": X}, micro_batch=number)
        ends.inbox.get(timeout=60)
        ends.links.take("forward", 0, 0, number)
        received = ends.other.receive(idle_s=5)
        assert received is not None and received[0] == Credit(run=RUN, size_bytes=48)
    ends.links.close()


@pytest.mark.parametrize(
    ("tensors", "changes", "words"),
    [
        ({"x:0": X[:2]}, {}, "not in the plan"),
        ({"x:0": X.double()}, {}, "not in the plan"),
        ({"y:0": X}, {}, "not in the plan"),
        ({"x:0": X, "y:0": X}, {}, "not in the plan"),
        ({}, {}, "not in the plan"),
        ({"x:0": X}, {"parcel": "backward"}, "not in the plan"),
        ({"x:0": X}, {"source": 1}, "not in the plan"),
        ({"x:0": X}, {"run": "other"}, "a frame of run 'other'"),
    ],
)
def test_what_is_not_in_the_plan_is_refused(tensors: dict[str, Tensor], changes: dict[str, object], words: str) -> None:
    ends = Ends()
    ends.send(tensors, **changes)
    error = ends.inbox.get(timeout=60)
    assert isinstance(error, PeerError) and str(error).startswith("device 'd0': ") and words in str(error)
    assert not ends.spans
    ends.links.close()


PACKED = Packing(codec="topk", ratio=4.0)


@pytest.mark.parametrize("packing", [Packing(codec="topk", ratio=5.0), Packing(codec="bf16")])
def test_what_is_packed_otherwise_than_planned_is_refused(packing: Packing) -> None:
    ends = Ends(expected=Expected({("forward", 0): frozenset({(("x:0", "float32", (3, 4), PACKED),)})}))
    header = header_of("x:0", X, packing)
    message = ToPeer(run=RUN, body=Arrived(parcel="forward", source=0, item=0, micro_batch=0), tensors=(header,))
    ends.other.send(message, [memoryview(bytearray(header.nbytes))])
    error = ends.inbox.get(timeout=60)
    assert isinstance(error, PeerError) and "not in the plan" in str(error)
    ends.links.close()


def test_a_packed_parcel_is_sent_and_arrives_unpacked() -> None:
    ends = Ends(expected=Expected({("forward", 0): frozenset({(("x:0", "float32", (3, 4), PACKED),)})}))
    ends.links.send(0, _parcel("backward"), {"x:0": X, "ids:0": X[0]}, packings={"x:0": PACKED})
    received = ends.other.receive(lambda message: None, idle_s=5)
    assert received is not None
    message, tensors = received
    assert [h.packing for h in message.tensors] == [PACKED, None]
    assert torch.equal(tensors[0], torch.where(X > 8, X, 0.0)) and torch.equal(tensors[1], X[0])
    header = header_of("x:0", X, PACKED)
    parcel = ToPeer(run=RUN, body=Arrived(parcel="forward", source=0, item=0, micro_batch=0), tensors=(header,))
    ends.other.send(parcel, [bytes_of(codec_of(PACKED).encode(X))])
    assert ends.inbox.get(timeout=60) == Arrived(parcel="forward", source=0, item=0, micro_batch=0)
    (taken,) = ends.links.take("forward", 0, 0, 0)
    assert torch.equal(taken, tensors[0])
    received_spans = [span for span in ends.spans if span.track == "receive"]  # that of the send may come after it
    assert received_spans[-1].size_bytes == PACKED.wire_bytes(12)
    ends.links.close()


def test_only_parcels_that_somebody_expects_may_come_packed() -> None:
    header = header_of("x:0", X, PACKED)
    beat = Heartbeat(run=RUN, tensors=(header,))
    parcel = ToPeer(run=RUN, body=Arrived(parcel="forward", source=0, item=0), tensors=(header,))
    for message, guard in ((beat, lambda message: None), (parcel, None)):
        a, b = socket.socketpair()
        sender, receiver = SocketChannel(a, "device 'd1'", 5.0), SocketChannel(b, "device 'd0'", 5.0)
        sender.send(message, [memoryview(bytearray(header.nbytes))])
        with pytest.raises(PeerError, match="tensor 'x:0': packed as 'topk', which is not expected here"):
            receiver.receive(guard, idle_s=5)
        sender.close()
        receiver.close()


def test_a_value_that_cannot_be_packed_ends_the_lane_by_name() -> None:
    ends = Ends()
    ends.links.send(0, _parcel("backward"), {"block:0": X.double() * 1e300}, packings={"block:0": PACKED})
    error = ends.inbox.get(timeout=60)
    assert isinstance(error, UserError) and "topk of 'block:0': got an element beyond float32" in str(error)
    ends.links.close()


def test_what_is_not_finite_is_sent_as_it_is() -> None:
    ends = Ends()
    ends.links.send(0, _parcel("backward"), {"block:0": X / 0}, packings={"block:0": PACKED})
    received = ends.other.receive(idle_s=5)
    assert received is not None and [h.packing for h in received[0].tensors] == [None]
    assert torch.equal(received[1][0].nan_to_num(7), (X / 0).nan_to_num(7))
    ends.links.close()


def test_a_mask_of_infinities_does_not_keep_others_from_being_packed() -> None:
    """Nor a value that is not finite, if both were to be packed: each is sent as the plan says, or as it is."""
    ends = Ends()
    mask = torch.where(X > 8, 0.0, -torch.inf)
    for packings, expected in (({"x:0": PACKED}, PACKED), ({"x:0": PACKED, "mask:0": PACKED}, PACKED)):
        ends.links.send(0, _parcel("forward"), {"x:0": X, "mask:0": mask}, packings=packings)
        received = ends.other.receive(lambda message: None, 5.0)
        assert received is not None
        assert [h.packing for h in received[0].tensors] == [expected, None]
        assert torch.equal(received[1][1], mask)
    ends.links.close()


def test_a_neighbour_that_leaves_is_noticed_and_our_own_leaving_is_not() -> None:
    ends = Ends()
    ends.other.close()
    error = ends.inbox.get(timeout=60)
    assert isinstance(error, PeerError) and str(error) == "device 'd0': closed the link"
    ends.links.close()
    ours = Ends()
    ours.links.close()
    with pytest.raises(queue.Empty):
        ours.inbox.get(timeout=0.3)


def test_what_is_sent_leaves_through_the_lane() -> None:
    ends = Ends()
    ends.links.send(0, _parcel("backward"), {"x:0": X})
    received = ends.other.receive(idle_s=5)
    assert received is not None
    message, (tensor,) = received
    assert isinstance(message, ToPeer)
    assert message.body == Arrived(parcel="backward", source=1, item=3, micro_batch=1)
    assert torch.equal(tensor, X)
    ends.links.close()


def test_dial_names_who_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerError, match=rf"device 'd1': cannot connect to 127.0.0.1:{port}"):
        dial("127.0.0.1", port, "device 'd1'", 1.0)
