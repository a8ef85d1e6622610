"""Frames as Ray carries them: a header as bytes, and each tensor's memory as a numpy array of bytes.

Ray serialises bytes as they are and arrays out of band: it copies an array once, into the object store of a node, and
every reader on that node maps it. What it maps is read-only. Nothing else is given to Ray to serialise.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport.channel import Guard, Received, check_message, decode_message
from isthmus.training.layout import dtype_of, unpack

Payload = Sequence[NDArray[np.uint8]]  # one array of bytes for each tensor
RayFrame = tuple[bytes, Payload]
ALIGNMENT_BYTES = 16
"""The alignment of numbers where they are computed with. Bytes that come beside a small header may lie anywhere."""


def ray_frame(message: AnyMessage, payload: Sequence[memoryview] = ()) -> RayFrame:
    """Nothing is copied."""
    return msgspec.msgpack.encode(message), [np.frombuffer(p, np.uint8) if p.nbytes else _NOTHING for p in payload]


_NOTHING = np.empty(0, dtype=np.uint8)


def frame_bytes(frame: RayFrame) -> int:
    """Return the bytes of the header and all tensors."""
    return len(frame[0]) + sum(part.nbytes for part in frame[1])


def received(frame: RayFrame, guard: Guard | None) -> Received:
    """The message and its tensors, in the memory of the arrays. PeerError as from a socket."""
    header, payload = frame
    message = decode_message(memoryview(header))
    check_message(message, sum(part.nbytes for part in payload), guard)
    if [h.nbytes for h in message.tensors] != [part.nbytes for part in payload]:
        raise PeerError("frame payload: its parts are not the tensors that its header announces")
    return message, [
        unpack(torch.from_numpy(_tensor_memory(part)).view(dtype_of(header)), header)
        for part, header in zip(payload, message.tensors, strict=True)
    ]


class _Mapped:
    """Memory that Ray maps read-only, as numpy takes it for writable: torch knows of no read-only tensors. An algorithm
    that writes to what it received is refused afterwards, as everywhere."""

    def __init__(self, part: NDArray[np.uint8]) -> None:
        self.kept = part
        self.__array_interface__ = {**part.__array_interface__, "data": (part.ctypes.data, False)}


def _tensor_memory(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return part.copy() if not part.size or part.ctypes.data % ALIGNMENT_BYTES else np.asarray(_Mapped(part))
