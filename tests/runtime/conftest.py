"""Fixtures of several files."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from isthmus.graph import capture as capture_module
from isthmus.graph.capture import Captured, Column, capture
from isthmus.protocol import failures
from isthmus.runtime.coordinator import host
from isthmus.runtime.transport.channel import SocketChannel

from .lanes import Pair

_captured: dict[tuple[object, ...], Captured] = {}


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
    monkeypatch.setattr(failures, "GRACE_S", 0.1)
    monkeypatch.setattr(host, "TICK_S", 0.05)


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    """Test after test captures the same few models, for most of a second each. That capturing again gives the same
    graph is the claim of a test of its own (`tests/graph/test_capture.py`); what tests write to files is captured
    anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_module, "capture", _remembered)
        yield


def _remembered(
    build: Callable[[], nn.Module], columns: Mapping[str, Column], *, name: str, batch: int, dtype: torch.dtype
) -> Captured:
    asked: Any = inspect.getclosurevars(build).nonlocals["job"].model
    if (":" in asked.name and not asked.name.startswith("tests.")) or asked.name == "hf":
        return capture(build, columns, name=name, batch=batch, dtype=dtype)
    key = (msgspec.json.encode(asked), tuple(columns.items()), batch, dtype)
    if key not in _captured:
        _captured[key] = capture(build, columns, name=name, batch=batch, dtype=dtype)
    return _captured[key]
