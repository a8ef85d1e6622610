"""Drawn integers in the messages that set up connections between two devices: streams of one link, and addresses that
the coordinator passes on. RelayReady and Heartbeat have none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from isthmus.errors import PeerError
from isthmus.runtime.device.peer_connections import PeerConnections
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import (
    MOST_ADDRESSES,
    Hello,
    RelayConnect,
    RelayReady,
    RelayWait,
    Rendezvous,
    StreamHello,
)
from isthmus.runtime.transport import multi_stream, relay, rendezvous
from isthmus.runtime.transport.multi_stream import StreamAssembler
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute, RelayStandby

from ..drawn_integers import Lies, received

pytestmark = pytest.mark.thorough

RUN, STREAMS = "secret", 3
HERE = ("127.0.0.1", 4000)
TOLD = (("10.0.0.2", 4001), ("2001:db8::2", 4002))


class _Stream:
    """A connection of one device, on which this comes first."""

    party, connection = None, None

    def __init__(self, first: AnyMessage, other: str = "oslo") -> None:
        self.first, self.other = [first], other
        self.closed = False

    def receive(self, *_: object, **__: object) -> Any:
        return self.first.pop(0), []

    def close(self) -> None:
        self.closed = True


class _Whole(_Stream):
    """Streams that were put together."""

    def __init__(self, channels: Sequence[Any], _: float) -> None:
        super().__init__(Hello(run=RUN, stage=0, epoch=0))
        self.streams = list(channels)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(multi_stream, "assembled", _Whole)
    listener, dialer = SimpleNamespace(start=lambda _: None), SimpleNamespace(timeout_s=5.0, identity=None)
    return lambda: PeerConnections(cast(Any, listener), RUN, cast(Any, dialer))


def _hello(number: int, of: int = STREAMS) -> StreamHello:
    return StreamHello(run=RUN, stream_group="group", number=number, of=of)


def test_streams_of_a_link_are_whole_or_none(peers: Any) -> None:
    """Before and after the others of its link: what is put together has each stream once, in order."""
    lies = Lies(1, 2 * STREAMS)
    for wrong in range(STREAMS):
        others = [number for number in range(STREAMS) if number != wrong]
        for after in (0, 2):

            def take(message: AnyMessage, after: int = after, others: Sequence[int] = others) -> None:
                found = peers()
                liar = _Stream(message)
                streams = [_Stream(_hello(number)) for number in others]
                streams.insert(after, liar)
                first = [cast(StreamHello, stream.first[0]) for stream in streams]
                for stream in streams:
                    found._on_connection(cast(Any, stream))
                for _, _, whole in found._waiting:
                    said = [first[streams.index(stream)] for stream in whole.streams]
                    assert [(one.number, one.of) for one in said] == [(n, len(said)) for n in range(len(said))]
                if liar.closed:
                    raise PeerError("oslo: hung up on")

            lies.about(_hello(wrong), take, names="oslo")
    lies.told()
    found = peers()
    for number in (2, 0, 1):
        found._on_connection(cast(Any, _Stream(_hello(number))))
    assert [(epoch, stage) for epoch, stage, _ in found._waiting] == [(0, 0)]


@pytest.mark.parametrize(("of", "number"), [(2, 0), (3, 2)])
def test_streams_of_another_number_are_another_link(of: int, number: int) -> None:
    """The second of two, where a third one had come: it raised KeyError."""
    assembler = StreamAssembler(5.0)
    assert assembler.add(cast(Any, _Stream(_hello(2))), _hello(2)) is None
    if of == STREAMS:
        with pytest.raises(PeerError, match=r"^oslo: stream 2 came twice$"):
            assembler.add(cast(Any, _Stream(_hello(2))), _hello(2))
    else:
        assert assembler.add(cast(Any, _Stream(_hello(number, of))), _hello(number, of)) is None


class _Line:
    """To a coordinator that says this."""

    party, other = None, "coordinator"

    def __init__(self, *said: AnyMessage) -> None:
        self.said, self.sent = list(said), list[AnyMessage]()
        self.peer_address, self.connection = HERE, None

    def receive(self, check: Any = None, **_: object) -> Any:
        if not self.said:
            return None
        check(self.said[0])
        return self.said.pop(0), []

    received_bytes = 1

    def send(self, message: AnyMessage) -> None:
        self.sent.append(received(cast(Any, message)))

    def close(self) -> None: ...

    def bare(self) -> None: ...


@pytest.mark.parametrize("waits", [False, True], ids=["asks", "waits"])
def test_a_device_dials_where_another_one_may_be(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[tuple[str, int], ...]] = []
    there = threading.Event()

    def opened(here: object, targets: Any, taken: object, **_: object) -> None:
        dialled.append(tuple(targets))
        there.set()

    monkeypatch.setattr(rendezvous, "open_simultaneously", opened)
    monkeypatch.setattr(rendezvous, "DIRECT_S", 0.0)
    monkeypatch.setattr(rendezvous, "own_addresses", lambda _: ())
    right = Rendezvous(run=RUN, addresses=TOLD, after_s=0.1)
    lies = Lies(2, 1)

    def take(message: AnyMessage) -> None:
        line = _Line(message, RelayReady(run=RUN, failure="nobody"))
        dialer = PeerDialer(coordinator=HERE, identity=None, timeout_s=5.0)
        monkeypatch.setattr(PeerDialer, "coordinator_channel", lambda _: (line, ("10.0.0.1", 4000)))
        there.clear()
        if waits:
            standby: Any = RelayStandby.__new__(RelayStandby)
            standby._dialer, standby._run, standby._taken = dialer, RUN, lambda _: None
            standby._meet(cast(Any, line), ("10.0.0.1", 4000), message)
        else:
            ways: Any = SimpleNamespace(attempt=lambda _: None, first=lambda *_, **__: None)
            route = PeerRoute(run=RUN, other="oslo", host="", port=0, id="1" * 64)
            with pytest.raises(PeerError, match="nobody"):
                dialer._by_coordinator(route, ways, direct=True)
        assert there.wait(60.0)
        assert {host for host, _ in dialled[-1]} <= {host for host, _ in TOLD}
        assert all(0 < port < 1 << 16 for _, port in dialled[-1])

    lies.about(right, take)
    lies.told()
    take(right)
    assert dialled[-1] == TOLD


@pytest.mark.parametrize("kind", [RelayWait, RelayConnect])
def test_a_coordinator_passes_addresses_on_that_others_take(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device says of itself goes to another one: as a message that it can read, whatever was said."""
    monkeypatch.setattr(relay, "least_round_trip_s", lambda _: None)
    more = {"id": "1" * 64} if kind is RelayConnect else {}
    right = kind(run=RUN, addresses=tuple(("2001:db8::2", 4000 + n) for n in range(MOST_ADDRESSES)), **more)
    near, lies = relay._End((HERE,), 0.0), Lies(3, 1)

    def take(message: AnyMessage) -> None:
        told = near.rendezvous(RUN, relay._end(cast(Any, _Line()), cast(RelayWait, message)))
        passed = cast(Rendezvous, received(told))
        assert passed.addresses[0] == HERE, "as the coordinator sees it"
        assert len(passed.addresses) <= MOST_ADDRESSES and all(0 < port < 1 << 16 for _, port in passed.addresses)

    lies.about(right, take)
    lies.told()
    with pytest.raises(PeerError):  # it was passed on
        received(msgspec.structs.replace(right, addresses=(("2001:db8::2", 0),)))
