"""Channels of `alice` and `bob`, and parcels for their lanes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from isthmus.protocol.run_messages import Arrived
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import ToPeer
from isthmus.runtime.transport.channel import Channel, SocketChannel, frame
from isthmus.runtime.transport.lanes import SendLane
from isthmus.training.layout import header_of, pack

MBIT = 1e6 / 8

Pair = tuple[SocketChannel, SocketChannel]


def parcel(number: int, tensor: Tensor) -> ToPeer:
    return ToPeer(run="r", body=Arrived(parcel="forward", source=0, item=number), tensors=(header_of("x", tensor),))


def put(lane: SendLane, number: int, size_bytes: int) -> int:
    """Hand over a parcel; returns the bytes of its frame."""
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)
    message = parcel(number, tensor)
    lane.put(message, [tensor])
    return sum(piece.nbytes for piece in frame(message, [pack(tensor)]))


def take(channel: Channel, idle_s: float = 5.0) -> tuple[float, AnyMessage]:
    """The next message, and when it had arrived whole."""
    received = channel.receive(idle_s=idle_s)
    assert received is not None
    return time.monotonic(), received[0]


def item(message: AnyMessage) -> int:
    assert isinstance(message, ToPeer) and isinstance(message.body, Arrived)
    return message.body.item
