"""Frames of a peer that lies in the integers of one message, as the receiver's decoder reads them.

A test of a program hands in the right message of each step and is given what arrives: the same message but for a drawn
integer, or PeerError where the decoder refuses it. 400 draws a test; 10,000 with ISTHMUS_FAULTS=1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport.channel import Guard, check_message, decode_message, in_host_memory
from isthmus.training.layout import pack
from tests.tiers import THOROUGH

DRAWN = 10_000 if THOROUGH else 200
EDGES = (
    *(-(1 << 63), -1, 0, 1, 2, 3, 4, 5, 8, 1 << 31, 1 << 32, 10**15),
    *((1 << 48) - 1, 1 << 48, (1 << 48) + 1, (1 << 63) - 1, (1 << 64) - 1),
)

Path = tuple[str | int, ...]
"""Where an integer stands in a message: keys of fields and places in lists."""


def integers_of(content: Any, path: Path = ()) -> list[Path]:
    """Of a message as msgpack holds it. The lengths of lists are no integers of it."""
    if isinstance(content, bool):
        return []
    if isinstance(content, int):
        return [path]
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [found for key, value in inner for found in integers_of(value, (*path, key))]


def drawn_integer(draw: random.Random, right: int) -> int:
    """An edge of a type's range, a number near the right one, any number of 64 bits, or a small one."""
    near = right + draw.choice((-2, -1, 1, 2))
    return draw.choice((draw.choice(EDGES), near, draw.randrange(-(1 << 63), 1 << 63), draw.randrange(9)))


def received(message: msgspec.Struct) -> AnyMessage:
    """As the receiver reads it. PeerError where its decoder refuses it."""
    return decode_message(memoryview(msgspec.msgpack.encode(message)))


def with_drawn(draw: random.Random, message: msgspec.Struct, keep: Sequence[str] = ()) -> AnyMessage:
    """`message` as the receiver reads it after one of its integers was drawn anew, but for fields named in `keep`.
    PeerError where its decoder refuses it; ValueError for a message without integers."""
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    paths = [path for path in integers_of(content) if not set(path) & set(keep)]
    if not paths:
        raise ValueError(f"{type(message).__name__} has no integer")
    *way, last = draw.choice(paths)
    holder = content
    for key in way:
        holder = holder[key]
    holder[last] = drawn_integer(draw, holder[last])
    return decode_message(memoryview(msgspec.msgpack.encode(content)))


def landed(
    message: AnyMessage, tensors: Sequence[Tensor] = (), guard: Guard | None = None
) -> tuple[AnyMessage, list[Tensor]]:
    """As a channel hands it on: its headers, its size and what `guard` says are checked (PeerError), then `tensors`,
    which were sent with it, are received as it describes them."""
    payload, at = b"".join(bytes(pack(tensor)) for tensor in tensors), 0
    check_message(message, len(payload), guard)

    def fill(buffer: memoryview) -> None:
        nonlocal at
        buffer[:] = payload[at : at + buffer.nbytes]
        at += buffer.nbytes

    return message, in_host_memory(message, fill)


def possible_threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Torch's threads are left as they are. Whatever number it was to have, machines have so many cores."""
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    yield
    assert all(1 <= number <= 1024 for number in found)


class Lies:
    """Drawn integers in the right messages of one test: how many were refused, and how many a run may have."""

    def __init__(self, seed: int, messages: int) -> None:
        """`messages` that the right conversation has at least: each is drawn so often that all together are DRAWN."""
        self.draw = random.Random(seed)
        self.refused = self.taken = 0
        self._each = -(-DRAWN // messages)

    def about(
        self, right: msgspec.Struct, take: Callable[[AnyMessage], None], *, names: str = "", keep: Sequence[str] = ()
    ) -> None:
        """Hand what a liar says in place of `right` to `take`, which raises PeerError for what it refuses. That error
        says `names`, and nothing else may be raised."""
        for _ in range(self._each):
            try:
                message = with_drawn(self.draw, right, keep)
                while message == right:
                    message = with_drawn(self.draw, right, keep)
            except PeerError:  # of the decoder: the channel names the sender
                self.refused += 1
                continue
            try:
                take(message)
            except PeerError as e:
                assert names in str(e), f"{e}: does not name {names}"
                self.refused += 1
            else:
                self.taken += 1

    def told(self) -> None:
        """With `pytest -s`; at least a tenth was refused, and something was taken."""
        print(f"{self.refused + self.taken} drawn, {self.refused} refused, {self.taken} taken")
        assert self.refused > (self.refused + self.taken) // 10
        assert self.taken and self.refused + self.taken >= DRAWN
