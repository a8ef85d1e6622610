"""Tensors in safetensors files, by range: a file's header is read, and a tensor's bytes when they are wanted. What is
sent so is never whole in memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.training.layout import TensorHeader, bytes_of, dtype_of, header_of, in_a_row, receive_buffer, unpack

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
PIECE_BYTES = 1 << 20
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""The types of the format that operators know, by the format's names."""
Size = Annotated[int, Meta(ge=0)]


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a file, without strides of its own. What reads it raises UserError where the file is shorter now."""

    header: TensorHeader
    path: Path
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.header.shape)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.header)

    def pieces(self, most_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """Its bytes in order, at most so many at a time, each time in new memory."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for at in range(0, self.nbytes, most_bytes):
                piece = memoryview(bytearray(min(most_bytes, self.nbytes - at)))
                self._fill(file, piece)
                yield piece

    def read(self) -> Tensor:
        """In memory of its own."""
        flat, buffer = receive_buffer(self.header)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            self._fill(file, buffer)
        return unpack(flat, self.header)

    def _fill(self, file: RawIOBase, buffer: memoryview) -> None:
        at = 0
        while at < buffer.nbytes:
            got = file.readinto(buffer[at:])
            if not got:
                raise UserError(f"{self.path}: ends in the middle of tensor {self.header.name!r}: truncated since")
            at += got


Sent = Tensor | StoredTensor
"""A tensor to send, or to write: in memory, or in a file."""


def sent_header(name: str, tensor: Sent) -> TensorHeader:
    """The header to send with it under this name."""
    if isinstance(tensor, StoredTensor):
        return msgspec.structs.replace(tensor.header, name=name)
    return header_of(name, tensor)


def pieces_of(tensor: Sent) -> Iterator[memoryview]:
    """The bytes of its elements by index, in order."""
    return tensor.pieces() if isinstance(tensor, StoredTensor) else iter((bytes_of(in_a_row(tensor.contiguous())),))


def in_memory(tensor: Sent) -> Tensor:
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def place_of(tensor: Sent) -> Hashable:
    """Where its elements are: that of another name too, where one is tied to it."""
    return (tensor.path, tensor.offset) if isinstance(tensor, StoredTensor) else tensor.data_ptr()


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; only its header is read. UserError where it cannot be read, is no such
    file, is truncated, or has a type that operators do not know."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= MOST_HEADER_BYTES else b""
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        found = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
        there = path.stat().st_size - 8 - size
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except msgspec.MsgspecError:
        raise UserError(f"{path}: no safetensors file, or truncated in its header") from None
    return {
        name: StoredTensor(_header(path, name, e, there), path, 8 + size + e.data_offsets[0])
        for name, e in found.items()
    }


def _header(path: Path, name: str, entry: _Entry, there: int) -> TensorHeader:
    if entry.dtype not in DTYPES:
        raise UserError(
            f"{path}: tensor {name!r} is of type {entry.dtype}, expected one of: {', '.join(sorted(DTYPES))}"
        )
    dtype, (start, end) = DTYPES[entry.dtype], entry.data_offsets
    if end - start != math.prod(entry.shape) * DTYPE_BYTES[dtype]:
        raise UserError(
            f"{path}: tensor {name!r}: {end - start} bytes, which is not what {dtype} {list(entry.shape)} has"
        )
    if end > there:
        raise UserError(f"{path}: {there} bytes of tensors, expected {end} for {name!r}: truncated")
    strides = tuple(math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape)))
    return TensorHeader(name, dtype, entry.shape, strides)
