"""State goes from device to device before a stage begins: one that lacks parts dials each of its donors, says which
parts it wants, and gets them one after the other, each as one frame.

    receiver ── StateHello: device, epoch, parts ──► donor    both are named by the coordinator's orders
    receiver ◄── GivenPart, GivenPart, ... ───────── donor    from the memory of its session, whatever its stage does
    receiver ── closes the connection when it has all that it asked for

A part is refused before it is received unless it is of this run, epoch and step, was asked for and is not here yet, and
has the shapes of the receiver's stage. What is here stays when the connection breaks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.protocol.run_messages import GiveState
from isthmus.runtime.device.peer_connections import is_peer
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import GivenPart, Peer, StateHello
from isthmus.runtime.transport.channel import SocketChannel, frame
from isthmus.runtime.transport.lanes import ShapedLink
from isthmus.training.layout import header_of, pack
from isthmus.training.snapshot import Part, check_state

Shapes = Mapping[str, tuple[int, ...]]


class _Order(NamedTuple):
    step: int
    parts: frozenset[str]
    peer: Peer


class StateGiver:
    """The donor's side: gives what the coordinator ordered to whom it named. Any thread."""

    def __init__(self, run: str, values: Callable[[int, Set[str]], Mapping[str, Part]], timeout_s: float) -> None:
        """`values` returns parts of the state after a step, as far as they are in memory. Who asks before the
        coordinator's order is here waits for `timeout_s`."""
        self._run = run
        self._values = values
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._epoch = -1  # of the orders
        self._orders: dict[str, _Order] = {}  # by receiver

    def ordered(self, order: GiveState, peers: Sequence[Peer]) -> None:
        """`peers`: the receivers. Those of earlier epochs get no more."""
        named = {peer.device: peer for peer in peers}
        with self._changed:
            if order.epoch > self._epoch:
                self._epoch, self._orders = order.epoch, {}
            if order.epoch < self._epoch:
                return
            for device, parts in order.receivers.items():
                if device not in named:
                    continue  # it is gone
                before = self._orders.get(device)
                parts = parts | before.parts if before is not None else parts
                self._orders[device] = _Order(order.step, parts, named[device])
            self._changed.notify_all()

    def give(self, hello: StateHello, channel: SocketChannel) -> None:
        """Answer a device that asks. Returns when the connection is closed; who may not ask gets nothing."""
        try:
            if (
                hello.run == self._run
                and (order := self._wait(hello)) is not None
                and is_peer(channel.party, order.peer)
            ):
                self._send(hello, order, channel)
        except PeerError:  # the receiver says what it lacks
            pass
        finally:
            channel.close()

    def _wait(self, hello: StateHello) -> _Order | None:
        """Return the order that covers the request; None if none comes."""

        def covers() -> bool:
            found = self._orders.get(hello.device)
            return self._epoch == hello.epoch and found is not None and hello.parts <= found.parts

        with self._changed:
            self._changed.wait_for(lambda: self._epoch > hello.epoch or covers(), self._timeout_s)
            return self._orders[hello.device] if covers() else None

    def _send(self, hello: StateHello, order: _Order, channel: SocketChannel) -> None:
        values, sender = self._values(order.step, hello.parts), StateSender(channel, order.peer.shape)
        for part in sorted(hello.parts & values.keys()):
            tensors = values[part]
            headers = tuple(header_of(name, t) for name, t in tensors.items())
            given = GivenPart(run=self._run, epoch=hello.epoch, step=order.step, part=part, tensors=headers)
            sender.send(given, list(tensors.values()))
            if self._epoch != hello.epoch:
                return
        sender.close()
        if hello.parts <= values.keys():
            channel.receive(_nothing, idle_s=self._timeout_s)  # until the receiver has all and closes


def _nothing(message: AnyMessage) -> None:
    raise PeerError(f"sent {type(message).__name__} after it asked for state")


class StateSender:
    """The way of states to another device, shaped where links are emulated."""

    def __init__(self, channel: SocketChannel, shape: Link | None) -> None:
        self._channel = channel
        self._failures: list[Exception] = []
        self._link = ShapedLink(channel, shape, self._failures.append) if shape is not None else None

    def send(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Return when it has left. PeerError where it cannot."""
        payload = [pack(t) for t in tensors]
        if self._link is None:
            self._channel.send(message, payload)
        else:
            self._link.send(frame(message, payload), time.monotonic())
        if self._failures:
            raise PeerError(f"{self._channel.other}: {self._failures[0]}")

    def close(self) -> None:
        """Wait until all has arrived."""
        if self._link is not None:
            self._link.close()


class DonorConnection:
    """A connection to a donor, dialled and received by a thread. A subclass makes this last in its constructor."""

    def __init__(self, name: str, reach: Callable[[], SocketChannel]) -> None:
        """`name` is the thread's; `reach` dials."""
        self._reach = reach
        self._closed = threading.Event()
        self._channel: SocketChannel | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if (channel := self._channel) is not None:
            channel.close()

    def _run(self) -> None:
        try:
            self._channel = channel = self._reach()
            try:
                self._exchange(channel)
            finally:
                channel.close()
        except Exception as e:  # of any kind: the coordinator has another way to get the state there
            if not self._closed.is_set():
                self._broken(e)

    def _exchange(self, channel: SocketChannel) -> None:
        raise NotImplementedError

    def _broken(self, error: Exception) -> None:
        """Not called after `close`."""
        raise NotImplementedError


class StateFetch(DonorConnection):
    """The receiver's side: the parts of one donor."""

    def __init__(
        self,
        hello: StateHello,
        step: int,
        shapes: Shapes,
        reach: Callable[[], SocketChannel],
        arrived: Callable[[Mapping[str, Part]], None],
        failed: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        """`shapes`: of the parts that are asked for. `reach` dials the donor. The thread calls `arrived` with each
        part, and `failed` with the reason where no more come; neither after `close`."""
        self._timeout_s = timeout_s
        self._hello = hello
        self._step = step
        self._shapes = dict(shapes)  # of the parts that are still to come
        self._arrived = arrived
        self._failed = failed
        super().__init__(f"fetch state for {hello.device}", reach)

    def _exchange(self, channel: SocketChannel) -> None:
        channel.send(self._hello)
        while self._shapes and not self._closed.is_set():
            self._take(channel)

    def _broken(self, error: Exception) -> None:
        self._failed(str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}")

    def _take(self, channel: SocketChannel) -> None:
        received = channel.receive(self._guard, self._timeout_s)
        if received is None:
            raise PeerError(f"{channel.other}: closed the connection before it gave {min(self._shapes)!r}")
        given, tensors = received
        assert isinstance(given, GivenPart), "no other message is let in"
        del self._shapes[given.part]
        if not self._closed.is_set():
            part = {h.name: t for h, t in zip(given.tensors, tensors, strict=True)}
            self._arrived({given.part: part})

    def _guard(self, message: AnyMessage) -> None:
        """PeerError unless it is a part that is due. Errors do not name the donor."""
        hello = self._hello
        if not isinstance(message, GivenPart):
            raise PeerError(f"sent {type(message).__name__} where a part of a state was due")
        got, due = (message.run, message.epoch, message.step), (hello.run, hello.epoch, self._step)
        if got != due:
            what = next(w for w, a, b in zip(("run", "epoch", "step"), got, due, strict=True) if a != b)
            raise PeerError(f"sent a part of a state of another {what}: {got!r}, expected {due!r}")
        if message.part not in self._shapes:
            raise PeerError(f"sent {message.part!r}, which is not a part that was asked for and is still to come")
        check_state({message.part: self._shapes[message.part]}, message.tensors)
