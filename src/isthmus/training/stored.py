"""Tensors in safetensors files, here or in a store, by range: a file's header is read, and a tensor's bytes when they
are wanted. A file is written as its bytes come. What is sent or saved so is never whole in memory."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.protocol.draws import Drawn
from isthmus.safetensors_header import Entry, read_header
from isthmus.stores import StoreFile
from isthmus.training.layout import (
    TensorHeader,
    bytes_of,
    dtype_of,
    header_of,
    in_a_row,
    receive_buffer,
    row_stride,
    travels_in_a_row,
    unpack,
)

PIECE_BYTES = 1 << 20
LEAST_VIEWED_BYTES = 1 << 16  # smaller tensors are not worth pages, and a map, of their own
DTYPES = {
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The types of the format that operators know, by the format's names, in the order in which a file has them."""
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES.values())}
_FORMAT_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Size = Annotated[int, Meta(ge=0)]


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a file, without strides of its own. What reads it raises UserError where the file is shorter now, or
    in a store another."""

    header: TensorHeader
    path: Path
    offset: int  # of its first byte in the file
    key: str  # its name in the file
    stored: str = ""  # the type of its elements in the file, where they are cast when they are read
    copied: bool = False  # a variable of its own, which begins with the values of another
    store: StoreFile | None = None  # where the file is, if it is not at the path
    sha256: str = ""  # of its bytes in a store's file, where that is known: what reads it raises UserError for others
    drawn: Drawn | None = None  # how a device makes it without the file

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.header.shape)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.header)

    def named(self, name: str) -> StoredTensor:
        return msgspec.structs.replace(self, header=msgspec.structs.replace(self.header, name=name))

    def cast(self, dtype: torch.dtype) -> StoredTensor:
        """The same of another type, as `Tensor.to` makes it, when it is read."""
        if dtype == self.dtype:
            return self
        header = msgspec.structs.replace(self.header, dtype=str(dtype).removeprefix("torch."))
        return msgspec.structs.replace(self, header=header, stored=self.stored or self.header.dtype, drawn=None)

    def changed(self, change: Callable[[Tensor], Tensor]) -> StoredTensor:
        """Other values of the same shape and type, which `change` makes of the tensor each time that it is read."""
        return _ChangedTensor(
            self.header,
            self.path,
            self.offset,
            self.key,
            self.stored,
            store=self.store,
            sha256=self.sha256,
            change=change,
        )

    def raw(self) -> StoredTensor:
        """The same without a cast."""
        header = msgspec.structs.replace(self.header, dtype=self.stored or self.header.dtype)
        return msgspec.structs.replace(self, header=header, stored="")

    def pieces(self, most_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """Its bytes in order, about so many at a time, each time in new memory."""
        if self.stored:
            own, made = dtype_of(self.raw().header), self.dtype
            for piece in self.raw().pieces(max(8, most_bytes // 8 * 8)):
                yield bytes_of(torch.frombuffer(piece, dtype=own).to(made))
            return
        if self.store is not None:
            digest, left = hashlib.sha256(), self.nbytes
            for part in self.store.pieces(self.offset, self.offset + self.nbytes):
                digest.update(part)
                left -= len(part)
                if not left and self.sha256 not in ("", digest.hexdigest()):
                    raise UserError(f"store {self.store.url}: {self.store.name}: {other_bytes(self.key)}")
                whole = memoryview(bytearray(part))
                yield from (whole[at : at + most_bytes] for at in range(0, whole.nbytes, most_bytes))
            return
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for at in range(0, self.nbytes, most_bytes):
                piece = memoryview(bytearray(min(most_bytes, self.nbytes - at)))
                self._fill(file, piece)
                yield piece

    def witness(self) -> Iterator[memoryview]:
        """The bytes that stand for it in a digest: its own, or the words of its store about them."""
        if self.store is None:
            return self.pieces()
        said = f"{self.store.size} {self.store.version} {self.offset} {self.raw().header.dtype}"
        return iter((memoryview(said.encode()),))

    def read(self) -> Tensor:
        """In memory of its own."""
        flat, buffer = receive_buffer(self.header)
        at = 0
        for piece in self.pieces():
            buffer[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return unpack(flat, self.header)

    def view(self) -> Tensor:
        """Return pages of the file, in memory once they are read. The file never has what is written there.
        In memory of its own where it is small, is cast or changed, comes from a store, or begins in the file at no
        multiple of its type, or of 16 bytes from 32 bits on: without AVX MKL sums in another order there (measured)."""
        size = DTYPE_BYTES[self.header.dtype]
        plain = type(self) is StoredTensor and not self.stored and self.store is None
        if not plain or self.nbytes < LEAST_VIEWED_BYTES or self.offset % (16 if size >= 4 else size):
            return self.read()
        start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.offset + self.nbytes:
                raise self._truncated()
            pages = mmap.mmap(file.fileno(), self.offset - start + self.nbytes, access=mmap.ACCESS_COPY, offset=start)
        return torch.frombuffer(pages, dtype=self.dtype, offset=self.offset - start).view(self.shape)

    def _truncated(self) -> UserError:
        return UserError(f"{self.path}: ends in the middle of tensor {self.header.name!r}: truncated since")

    def _fill(self, file: RawIOBase, buffer: memoryview) -> None:
        at = 0
        while at < buffer.nbytes:
            got = file.readinto(buffer[at:])
            if not got:
                raise self._truncated()
            at += got


class _ChangedTensor(StoredTensor, frozen=True):
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def pieces(self, most_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        yield bytes_of(in_a_row(self.read().contiguous()))

    def read(self) -> Tensor:
        own = (self.header, self.path, self.offset, self.key, self.stored)
        return self.change(StoredTensor(*own, store=self.store, sha256=self.sha256).read())


def other_bytes(key: str) -> str:
    """The end of the error for a tensor of a checkpoint in a store, by its digest."""
    return f"tensor {key!r} has other bytes than its device wrote"


Sent = Tensor | StoredTensor  # a tensor to send, or to write: in memory, or in a file


def sent_header(name: str, tensor: Sent) -> TensorHeader:
    """The header to send with it under this name."""
    return tensor.named(name).header if isinstance(tensor, StoredTensor) else header_of(name, tensor)


def pieces_of(tensor: Sent) -> Iterator[memoryview]:
    """The bytes of its elements by index, in order."""
    return tensor.pieces() if isinstance(tensor, StoredTensor) else iter((bytes_of(in_a_row(tensor.contiguous())),))


def witness_of(tensor: Sent) -> Iterator[memoryview]:
    return tensor.witness() if isinstance(tensor, StoredTensor) else pieces_of(tensor)


def in_memory(tensor: Sent) -> Tensor:
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def viewed(tensor: Sent) -> Tensor:
    return tensor.view() if isinstance(tensor, StoredTensor) else tensor


def place_of(tensor: Sent) -> Hashable:
    """Where its elements are: that of another name too, where one is tied to it."""
    if not isinstance(tensor, StoredTensor):
        return tensor.data_ptr()
    return tensor.store or tensor.path, tensor.offset, tensor.copied


def stored_tensors(path: Path, store: StoreFile | None = None) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; only its header is read. Of a file in a `store`, `path` has the header
    and the length. UserError where it cannot be read, is no such file, is truncated, or has a type that operators do
    not know."""
    try:
        entries, begins, there = read_header(path)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError:
        raise UserError(f"{path}: no safetensors file, or truncated in its header") from None
    return {
        name: StoredTensor(_header(path, name, e, there), path, begins + e.data_offsets[0], name, store=store)
        for name, e in entries.items()
    }


def _header(path: Path, name: str, entry: Entry, there: int) -> TensorHeader:
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
    return TensorHeader(name, dtype, entry.shape, row_stride(entry.shape))


def file_head(
    headers: Iterable[TensorHeader], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file as the library writes it, and where each tensor begins: by type, then by
    name. UserError for a type that no file has."""
    headers = list(headers)
    if unknown := [h for h in headers if h.dtype not in _PLACES]:
        raise UserError(f"tensor {unknown[0].name!r} is of type {unknown[0].dtype}, which the format has not")
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    places: dict[str, int] = {}
    at = 0
    for header in sorted(headers, key=lambda h: (_PLACES[h.dtype], h.name)):
        entries[header.name] = Entry(_FORMAT_NAMES[header.dtype], header.shape, (at, at + header.nbytes))
        places[header.name] = at
        at += header.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + place for name, place in places.items()}


class TensorFile:
    """A safetensors file as the library writes it, byte for byte: by type, then by name. Its tensors come in any order.

    An error of the disk is raised by `finish`: what comes over a connection is taken off it all the same.
    """

    def __init__(self, path: Path, headers: Iterable[TensorHeader], metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._digested = 0  # bytes of the file, from its beginning
        self._error: Exception | None = None
        self._places: dict[str, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w+b", buffering=0)
            head, self._places = file_head(headers, metadata)
        except (OSError, UserError) as e:
            self._error = e
        else:
            self._write(0, memoryview(head))

    def put(self, header: TensorHeader, pieces: Iterable[memoryview]) -> None:
        """The bytes of a tensor as they travel. One that does not travel in the order of its indices is held whole."""
        if not travels_in_a_row(header):
            flat, buffer = receive_buffer(header)
            at = 0
            for piece in pieces:
                buffer[at : at + piece.nbytes] = piece
                at += piece.nbytes
            pieces = [bytes_of(unpack(flat, header).contiguous().view(-1))]
        at = self._places.get(header.name, 0)
        for piece in pieces:
            self._write(at, piece)
            at += piece.nbytes

    def _write(self, at: int, piece: memoryview) -> None:
        if self._error is not None:
            return
        try:
            self._file.seek(at)
            left = piece
            while left:
                left = left[self._file.write(left) :]
        except OSError as e:
            self._error = e
        if at == self._digested:
            self._digest.update(piece)
            self._digested += piece.nbytes

    def finish(self) -> str:
        """All is there: return its SHA-256 once it is on disk. OSError, or UserError for a type that no file has."""
        try:
            if self._error is not None:
                raise self._error
            self._file.seek(self._digested)  # what came out of order is read again
            while piece := self._file.read(PIECE_BYTES):
                self._digest.update(piece)
            os.fsync(self._file.fileno())
        finally:
            self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def save_tensors(path: Path, tensors: Mapping[str, Sent], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file, a tensor at a time; return its SHA-256. Errors as of `TensorFile.finish`."""
    headers = {name: sent_header(name, tensor) for name, tensor in tensors.items()}
    rows = {name: msgspec.structs.replace(h, stride=row_stride(h.shape)) for name, h in headers.items()}
    file = TensorFile(path, rows.values(), metadata)
    try:
        for name, tensor in tensors.items():
            file.put(rows[name], pieces_of(tensor))
        return file.finish()
    finally:
        file.close()
