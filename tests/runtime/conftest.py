"""Fixtures of several files."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.runtime import session_host
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.session import session

from .lanes import Pair


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def connect() -> Iterator[Callable[[], Pair]]:
    """Makes connected channels of `alice` and `bob`."""
    made: list[SocketChannel] = []

    def connected() -> Pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            pair = SocketChannel(ours, "bob", 10.0), SocketChannel(listener.accept()[0], "alice", 10.0)
        made.extend(pair)
        return pair

    yield connected
    for channel in made:
        channel.close()


@pytest.fixture
def soon_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """a coordinator of this process waits no second for a better explanation of a loss: there is none."""
    monkeypatch.setattr(session, "GRACE_S", 0.1)
    monkeypatch.setattr(session_host, "TICK_S", 0.05)
