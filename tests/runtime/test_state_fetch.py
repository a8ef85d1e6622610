"""State from device to device: what a donor gives to whom, and what a receiver refuses."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.protocol.run_messages import GiveState, SendState
from isthmus.runtime.device.state_transfer import (
    STRETCH_BYTES,
    DonorConnection,
    StateGiver,
    StateOutlets,
    fetch_state,
    follow_state,
)
from isthmus.runtime.identity import Party
from isthmus.runtime.messages.assignment import FollowHello, GivenPart, Peer, StateHello, StateMessage, StatePart
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.training.layout import header_of, pack
from isthmus.training.snapshot import Part

RUN, EPOCH, STEP = "r", 2, 7
SHAPES = {"a": (3, 5), "b": (4,), "c": (2,)}
VALUES: Mapping[str, Part] = {
    part: {part: torch.randn(shape), f"optimizer.{part}.exp_avg": torch.randn(shape)} for part, shape in SHAPES.items()
}
ROME = Peer(device="rome", host="127.0.0.1", port=1)
ORDER = GiveState(step=STEP, receivers={"rome": frozenset("abc")}, epoch=EPOCH)


def _values(step: int, parts: Set[str]) -> Mapping[str, Part]:
    return {part: value for part, value in VALUES.items() if part in parts and step == STEP}


def _giver() -> StateGiver:
    return StateGiver(RUN, _values, 5.0)


def _pair(party: Party | None = None) -> tuple[SocketChannel, SocketChannel]:
    """The receiver's end and the donor's."""
    near, far = socket.socketpair()
    return SocketChannel(near, "device 'oslo'", 5.0), SocketChannel(far, "device 'rome'", 5.0, party=party)


def _fetching(
    parts: frozenset[str],
    reach: Callable[[], SocketChannel],
    arrived: Callable[[Mapping[str, Part]], None],
    ended: Callable[[str], None],
) -> DonorConnection:
    hello = StateHello(run=RUN, device="rome", epoch=EPOCH, parts=parts)
    shapes = {part: SHAPES[part] for part in parts}
    receive = partial(fetch_state, hello=hello, step=STEP, shapes=shapes, arrived=arrived, timeout_s=5.0)
    return DonorConnection("oslo", reach, receive, ended)


class Fetched:
    """The parts that a device gets from a donor, and the reason where no more come."""

    def __init__(self, channel: SocketChannel, parts: str = "abc") -> None:
        self.found: dict[str, Part] = {}
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._wanted = frozenset(parts)
        self.fetch = _fetching(self._wanted, lambda: channel, self._arrived, self.ended.put)

    def _arrived(self, found: Mapping[str, Part]) -> None:
        self.found |= found
        if self.found.keys() == self._wanted:
            self.ended.put("")

    def end(self) -> str:
        return self.ended.get(timeout=10)


def _asked(giver: StateGiver, parts: str = "abc", party: Party | None = None) -> Fetched:
    mine, donors = _pair(party)

    def answer() -> None:
        received = donors.receive()
        assert received is not None and isinstance(received[0], StateHello)
        giver.give(received[0], donors)

    threading.Thread(target=answer, daemon=True).start()
    return Fetched(mine, parts)


def test_a_device_gets_what_it_lacks_bit_by_bit() -> None:
    giver = _giver()
    asked = _asked(giver)  # before the donor knows of it
    giver.ordered(ORDER, [ROME])
    assert asked.end() == ""
    assert all(torch.equal(asked.found[p][name], value) for p in VALUES for name, value in VALUES[p].items())


def test_an_emulated_link_takes_its_time() -> None:
    giver = _giver()
    size_bytes = sum(t.nbytes for part in VALUES.values() for t in part.values())
    giver.ordered(ORDER, [msgspec.structs.replace(ROME, shape=Link(0.0, size_bytes / 0.3))])
    began_s, asked = time.monotonic(), _asked(giver)
    assert asked.end() == ""
    assert time.monotonic() - began_s >= 0.3


@pytest.mark.parametrize("wrong", ["parts", "epoch", "receiver", "key", "run"])
def test_who_may_not_ask_gets_nothing(wrong: str) -> None:
    giver = StateGiver("s" if wrong == "run" else RUN, _values, 0.2)
    order, peer = ORDER, ROME
    if wrong == "parts":
        order = GiveState(step=STEP, receivers={"rome": frozenset("ab")}, epoch=EPOCH)
    elif wrong == "epoch":
        order = GiveState(step=STEP, receivers=ORDER.receivers, epoch=EPOCH + 1)
    elif wrong == "receiver":
        order, peer = (
            GiveState(step=STEP, receivers={"lima": frozenset("abc")}, epoch=EPOCH),
            Peer(device="lima", host="h", port=1),
        )
    elif wrong == "key":
        peer = Peer(device="rome", host="127.0.0.1", port=1, id="another")
    giver.ordered(order, [peer])
    asked = _asked(giver, party=Party("device", "some") if wrong == "key" else None)
    assert asked.end() == "device 'oslo': closed the connection before it gave 'a'" and not asked.found


def test_a_second_order_adds_to_the_first_and_a_newer_epoch_ends_it() -> None:
    giver = _giver()
    for parts in ("a", "bc"):
        giver.ordered(GiveState(step=STEP, receivers={"rome": frozenset(parts)}, epoch=EPOCH), [ROME])
    assert _asked(giver).end() == ""
    giver.ordered(GiveState(step=STEP, receivers={}, epoch=EPOCH + 1), [])
    giver.ordered(ORDER, [ROME])  # it was on its way
    assert "closed the connection" in _asked(giver).end()


def _part(
    part: str = "a", tensors: Mapping[str, Tensor] | None = None, **fields: Any
) -> tuple[Any, Mapping[str, Tensor]]:
    tensors = VALUES[part] if tensors is None else tensors
    headers = tuple(header_of(name, t) for name, t in tensors.items())
    stated: dict[str, Any] = {"run": RUN, "epoch": EPOCH, "step": STEP, "part": part, **fields}
    return GivenPart(tensors=headers, **stated), tensors


LIES: dict[str, tuple[tuple[Any, Mapping[str, Tensor]], str]] = {
    "another run": (_part(run="s"), "sent a part of a state of another run: ('s', 2, 7), expected ('r', 2, 7)"),
    "another epoch": (_part(epoch=1), "sent a part of a state of another epoch: ('r', 1, 7), expected ('r', 2, 7)"),
    "another step": (_part(step=8), "sent a part of a state of another step: ('r', 2, 8), expected ('r', 2, 7)"),
    "a part twice": (_part("b"), "sent 'b', which is not a part that was asked for and is still to come"),
    "another part": (_part("c"), "sent 'c', which is not a part that was asked for and is still to come"),
    "another size": (_part(tensors={"a": torch.zeros(4, 5)}), "sent 'a' of shape [4, 5], which is not of its stage"),
    "another name": (_part(tensors={"a": torch.zeros(3, 5), "d": torch.zeros(2)}), "sent 'd' of shape [2], which"),
    "too little": (_part(tensors={}), "sent no 'a', which is of its stage"),
    "another message": ((Heartbeat(run=RUN), {}), "sent Heartbeat where a part of a state was due"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_was_not_agreed_is_refused_by_a_line_and_what_came_before_stays(lie: str) -> None:
    (message, tensors), reason = LIES[lie]
    mine, donors = _pair()
    asked = Fetched(mine, "ab")
    donors.receive()
    first, value = _part("b")
    donors.send(first, [pack(t) for t in value.values()])
    donors.send(message, [pack(t) for t in tensors.values()])
    assert asked.end().startswith(f"device 'oslo': {reason}")
    assert asked.found.keys() == {"b"}


def test_a_donor_that_dies_in_the_middle_and_one_that_nobody_reaches() -> None:
    mine, donors = _pair()
    asked = Fetched(mine, "ab")
    first, value = _part("b")
    donors.send(first, [pack(t) for t in value.values()])
    donors.close()
    assert asked.end().startswith("device 'oslo': ") and asked.found.keys() == {"b"}

    def reach() -> SocketChannel:
        raise PeerError("device 'oslo' at 127.0.0.1:1: refused")

    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    _fetching(frozenset("a"), reach, lambda found: None, ended.put)
    assert ended.get(timeout=5) == "device 'oslo' at 127.0.0.1:1: refused"


def test_a_fetch_that_is_called_off_says_nothing_more() -> None:
    mine, donors = _pair()
    asked = Fetched(mine, "ab")
    donors.receive()
    asked.fetch.close()
    assert donors.receive() is None
    time.sleep(0.1)
    assert asked.ended.empty() and not asked.found


FOLLOW = FollowHello(run=RUN, epoch=EPOCH, number=3, device="rome")
SEND = SendState(number=3, step=STEP, parts=frozenset("a"), receivers=frozenset({"rome"}), epoch=EPOCH)
ROW = torch.arange(100, dtype=torch.uint8)
STRETCH = StatePart(run=RUN, epoch=EPOCH, number=3, of="oslo", offset=0, tensors=(header_of("stretch", ROW),))


class Followed:
    """What a joining device gets from a donor, and the reason where no more comes."""

    def __init__(self, channel: SocketChannel) -> None:
        self.found: queue.SimpleQueue[tuple[StateMessage | StatePart, list[Tensor]]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        arrived = lambda message, tensors: self.found.put((message, tensors))  # noqa: E731
        receive = partial(follow_state, hello=FOLLOW, of="oslo", arrived=arrived, timeout_s=5.0)
        self.feed = DonorConnection("oslo", lambda: channel, receive, self.ended.put)

    def end(self) -> str:
        return self.ended.get(timeout=10)


def _following(outlets: StateOutlets, party: Party | None = None) -> Followed:
    mine, donors = _pair(party)

    def answer() -> None:
        received = donors.receive()
        assert received is not None and isinstance(received[0], FollowHello)
        outlets.attach(received[0], donors)

    threading.Thread(target=answer, daemon=True).start()
    return Followed(mine)


def test_a_joining_device_gets_what_is_put_before_it_comes_and_after_while_stages_go_first() -> None:
    outlets, busy = StateOutlets(RUN, 5.0), [True]
    asked = _following(outlets)  # before the donor knows of it
    outlets.open(SEND, [ROME], lambda: busy[0])
    for _ in range(2):
        outlets.put(STRETCH, [ROW], None)
    assert outlets.waiting_bytes() <= 2 * ROW.nbytes
    for _ in range(2):
        message, (row,) = asked.found.get(timeout=10)
        assert message == STRETCH and torch.equal(row, ROW), "a busy link delays it, and not for ever"
    outlets.put(STRETCH, [ROW], None)
    assert asked.found.get(timeout=10)[0] == STRETCH
    outlets.close()
    assert asked.found.empty() and outlets.waiting_bytes() == 0
    with pytest.raises(queue.Empty):  # it keeps what it has
        asked.ended.get(timeout=0.2)


@pytest.mark.parametrize("wrong", ["number", "receiver", "key", "run", "over"])
def test_who_may_not_follow_gets_nothing(wrong: str) -> None:
    outlets, asked, peer = StateOutlets("s" if wrong == "run" else RUN, 0.2), SEND, ROME
    if wrong == "number":
        asked = msgspec.structs.replace(SEND, number=4)
    elif wrong == "receiver":
        peer = Peer(device="lima", host="127.0.0.1", port=1)
    elif wrong == "key":
        peer = Peer(device="rome", host="127.0.0.1", port=1, id="another")
    outlets.open(asked, [peer], lambda: False)
    outlets.put(STRETCH, [ROW], None)
    if wrong == "over":
        outlets.close()
    followed = _following(outlets, Party("device", "some") if wrong == "key" else None)
    assert followed.end() == "device 'oslo': closed the connection" and followed.found.empty()


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(
            STRETCH, tensors=(header_of("stretch", torch.zeros(STRETCH_BYTES + 1, dtype=torch.uint8)),)
        ),
        msgspec.structs.replace(STRETCH, tensors=(header_of("stretch", torch.zeros(8)),)),
        msgspec.structs.replace(STRETCH, tensors=STRETCH.tensors * 2),
        msgspec.structs.replace(STRETCH, tensors=()),
        msgspec.structs.replace(STRETCH, of="lima"),
        msgspec.structs.replace(STRETCH, number=2),
        msgspec.structs.replace(STRETCH, epoch=1),
        msgspec.structs.replace(STRETCH, run="s"),
        StateMessage(
            run=RUN, epoch=EPOCH, number=3, of="oslo", kind="state", step=1, headers=(), tensors=STRETCH.tensors
        ),
        GivenPart(run=RUN, epoch=EPOCH, step=STEP, part="a"),
    ],
    ids=["too large", "no bytes", "two", "none", "of another", "number", "epoch", "run", "begun with bytes", "kind"],
)
def test_what_is_no_state_of_the_transfer_is_refused_before_it_is_received(wrong: Any) -> None:
    mine, donors = _pair()
    asked = Followed(mine)
    donors.receive()
    payload = [pack(torch.zeros(h.shape, dtype=getattr(torch, h.dtype))) for h in wrong.tensors]
    threading.Thread(target=lambda: _send(donors, wrong, payload), daemon=True).start()
    assert asked.end().startswith("device 'oslo': sent ") and asked.found.empty()


def _send(donors: SocketChannel, message: Any, payload: list[memoryview]) -> None:
    with contextlib.suppress(PeerError):  # the other end hangs up in the middle
        donors.send(message, payload)
