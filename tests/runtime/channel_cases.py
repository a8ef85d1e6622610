"""Implementations of `Channel` and frames for their tests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from torch import Tensor

from isthmus.protocol.run_messages import Arrived
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import ToPeer
from isthmus.runtime.transport.channel import (
    Channel,
    Received,
    SocketChannel,
    frame,
)
from isthmus.training.layout import header_of, pack


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@dataclass(frozen=True)
class Implementation:
    """How two connected ends are made, and a channel of one of them."""

    sockets: Callable[[], tuple[socket.socket, socket.socket]]
    channel: Callable[[socket.socket, str, float], Channel]

    @contextlib.contextmanager
    def pair(self, timeout_s: float = 10.0) -> Iterator[tuple[Channel, Channel]]:
        """Channels of `alice` and `bob`: each names the other."""
        ours, theirs = self.sockets()
        alice, bob = self.channel(ours, "bob", timeout_s), self.channel(theirs, "alice", timeout_s)
        try:
            yield alice, bob
        finally:
            alice.close()
            bob.close()

    @contextlib.contextmanager
    def against_raw(self, timeout_s: float = 10.0) -> Iterator[tuple[Channel, socket.socket]]:
        """A channel whose other end, `mallory`, writes and reads bytes as she likes."""
        ours, theirs = self.sockets()
        channel = self.channel(ours, "mallory", timeout_s)
        try:
            yield channel, theirs
        finally:
            channel.close()
            theirs.close()


IMPLEMENTATIONS = {
    "loopback TCP": Implementation(tcp_pair, SocketChannel),
    "socket pair": Implementation(socket.socketpair, SocketChannel),
}
every = pytest.mark.parametrize("kind", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


def parcel(number: int = 0, *tensors: Tensor) -> ToPeer:
    headers = tuple(header_of(f"t{i}", t) for i, t in enumerate(tensors))
    return ToPeer(run="r", body=Arrived(parcel="forward", source=0, item=number), tensors=headers)


def wire(message: AnyMessage, tensors: Sequence[Tensor] = ()) -> bytes:
    return b"".join(frame(message, [pack(t) for t in tensors]))


def received(future: Future[Received | None]) -> Received:
    found = future.result(10)
    assert found is not None
    return found
