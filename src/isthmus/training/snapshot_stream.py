"""A snapshot on its way: the bytes of its buffer leave in stretches, one tensor per message, and arrive in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from isthmus.training.layout import TensorHeader, header_of
from isthmus.training.snapshot import Snapshot, size_bytes

STRETCH = "stretch"
"""Name of a stretch in the header of its message."""


def stretches(flat: Tensor, most_bytes: int) -> Iterator[tuple[int, Tensor, tuple[TensorHeader, ...]]]:
    """The buffer in pieces of at most `most_bytes`: offset, bytes, and the headers of their message."""
    for offset in range(0, flat.numel(), most_bytes):
        stretch = flat[offset : offset + most_bytes]
        yield offset, stretch, (header_of(STRETCH, stretch),)


def stretch_bytes(headers: Sequence[TensorHeader]) -> int | None:
    """Size of the stretch in a message with these headers; None unless it carries one row of bytes and no more."""
    if len(headers) != 1:
        return None
    header = headers[0]
    plain = header.dtype == "uint8" and len(header.shape) == 1 and header.packing is None
    return header.shape[0] if plain else None


class IncomingSnapshot:
    """A snapshot of which a part has arrived."""

    def __init__(self, headers: tuple[TensorHeader, ...]) -> None:
        """Allocates its buffer: check the headers first."""
        self.snapshot = Snapshot(headers, torch.empty(size_bytes(headers), dtype=torch.uint8))
        self._received_bytes = 0

    @property
    def whole(self) -> bool:
        return self._received_bytes == self.snapshot.flat.numel()

    def expects(self, offset: int, headers: Sequence[TensorHeader]) -> bool:
        """Whether a message with this offset and these headers carries the next stretch."""
        size = stretch_bytes(headers)
        within = size is not None and self._received_bytes + size <= self.snapshot.flat.numel()
        return within and offset == self._received_bytes

    def add(self, stretch: Tensor) -> None:
        """The next stretch: uint8 of shape (bytes,), as `expects` said."""
        end = self._received_bytes + stretch.numel()
        self.snapshot.flat[self._received_bytes : end] = stretch
        self._received_bytes = end
