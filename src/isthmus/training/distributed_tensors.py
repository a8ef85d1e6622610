"""Tensors of a folder that `torch.distributed.checkpoint.save` wrote. Its `.metadata`, and what describes each tensor,
are pickles: they are read by `read_pickled`, and never run.

Format: torch.distributed.checkpoint.metadata, filesystem.FileSystemWriter and torch.save, as torch 2.13 has them.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.training.layout import TensorHeader, bytes_of, row_stride
from isthmus.training.pickled import read_pickled
from isthmus.training.stored import PIECE_BYTES, StoredTensor

METADATA = ".metadata"
_MOST_BYTES, _MOST_HEAD_BYTES = 100_000_000, 1 << 16  # of the metadata, of what describes a tensor
_OURS = "torch.distributed.checkpoint."
_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
_STORAGES = {
    "torch.LongStorage": "int64",
    "torch.DoubleStorage": "float64",
    "torch.ComplexFloatStorage": "complex64",
    "torch.FloatStorage": "float32",
    "torch.IntStorage": "int32",
    "torch.BFloat16Storage": "bfloat16",
    "torch.HalfStorage": "float16",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
_IN_METADATA = {
    *(f"{_OURS}metadata.{name}" for name in (*_CLASSES, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *("torch.Size", "torch.serialization._get_layout", *(f"torch.{dtype}" for dtype in _STORAGES.values())),
    *(f"{module}.{name}Path" for module in ("pathlib", "pathlib._local") for name in ("Posix", "Windows")),
    f"{_OURS}filesystem._StorageInfo",
}
_IN_TENSORS = {"torch._utils._rebuild_tensor_v2", "collections.OrderedDict", *_STORAGES}
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Sizes = tuple[Count, ...]


class _Size(msgspec.Struct, frozen=True, tag_field="kind", tag="torch.Size"):
    arguments: tuple[Sizes]


class _Index(msgspec.Struct, tag_field="kind", tag=f"{_OURS}metadata.MetadataIndex"):
    fqn: str
    offset: _Size | None = None


class _Place(msgspec.Struct, tag_field="kind", tag=f"{_OURS}filesystem._StorageInfo"):
    relative_path: str
    offset: Count
    length: Count
    transform_descriptors: object = None


class _Box(msgspec.Struct, tag_field="kind", tag=f"{_OURS}metadata.ChunkStorageMetadata"):
    offsets: _Size
    sizes: _Size


class _Properties(msgspec.Struct, tag_field="kind", tag=f"{_OURS}metadata.TensorProperties"):
    state: tuple[str, Any, Any, Any, Any]


class _Kept(msgspec.Struct, tag_field="kind", tag=f"{_OURS}metadata.TensorStorageMetadata"):
    properties: _Properties
    size: _Size
    chunks: list[_Box]


class _NoTensor(msgspec.Struct, tag_field="kind", tag=f"{_OURS}metadata.BytesStorageMetadata"):
    pass


class _Metadata(msgspec.Struct, tag_field="kind", tag=f"{_OURS}metadata.Metadata"):
    state_dict_metadata: list[tuple[str, _Kept | _NoTensor]]
    storage_data: list[tuple[_Index, _Place]]
    planner_data: list[tuple[str, tuple[str | int, ...]]] | None = None


class _Chunk(NamedTuple):
    box: tuple[slice, ...]
    path: Path
    at: int
    nbytes: int  # in the file


class ChunkedTensor(StoredTensor, frozen=True):
    """A tensor of which each rank that saved it wrote its part. What reads it raises UserError where these are damaged,
    or do not make a whole."""

    chunks: tuple[_Chunk, ...] = ()

    def pieces(self, most_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        whole = bytes_of(self.read().view(-1))
        yield from (whole[at : at + most_bytes] for at in range(0, whole.nbytes, most_bytes))

    def read(self) -> Tensor:
        whole, there = torch.empty(self.shape, dtype=self.dtype), torch.zeros(self.shape, dtype=torch.bool)
        for chunk in self.chunks:
            try:
                whole[chunk.box] = _saved(chunk, tuple(whole[chunk.box].shape), self.header.dtype)
            except OSError as e:
                raise UserError(f"{chunk.path}: cannot be read: {e.strerror or e}") from None
            except (ValueError, LookupError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile) as e:
                raise UserError(f"{chunk.path}: tensor {self.key!r} at byte {chunk.at}: {e}") from None
            there[chunk.box] = True
        if not there.all():  # chunks overlap, as together they are as large
            raise UserError(f"{self.path}: tensor {self.key!r}: its chunks do not fill it")
        return whole


def distributed_tensors(folder: Path) -> dict[tuple[str, ...], ChunkedTensor]:
    """The tensors by their keys in the dictionaries that were saved; none is read yet. UserError for a folder that is
    none of torch.distributed.checkpoint, or has what is not expected in one."""
    path = folder / METADATA
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"got {size} bytes, expected {_MOST_BYTES} at most")
        made = msgspec.convert(read_pickled(path.read_bytes(), _IN_METADATA), _Metadata)
        return dict(_tensors(folder, made))
    except OSError as e:
        raise UserError(f"{e.filename or path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:  # msgspec's errors too
        raise UserError(f"{path}: no metadata of torch.distributed.checkpoint that can be read: {e}") from None


def _tensors(folder: Path, made: _Metadata) -> Iterator[tuple[tuple[str, ...], ChunkedTensor]]:
    places = {(index.fqn, _sizes(index.offset)): place for index, place in made.storage_data}
    keys = dict(made.planner_data or ())
    for name, kept in made.state_dict_metadata:
        if isinstance(kept, _NoTensor):
            continue
        shape, dtype = _sizes(kept.size), kept.properties.state[0].removeprefix("torch.")
        header, chunks, elements = TensorHeader(name, dtype, shape, row_stride(shape)), list[_Chunk](), 0
        for box in kept.chunks:
            at, sizes = _sizes(box.offsets), _sizes(box.sizes)
            if (place := places.get((name, at))) is None:
                raise ValueError(f"tensor {name!r}: got no file of its part at {list(at)}")
            if dtype not in DTYPE_BYTES or not len(at) == len(sizes) == len(shape):
                raise ValueError(f"tensor {name!r}: got a part {list(sizes)} of {dtype} {list(shape)}")
            if Path(place.relative_path).name != place.relative_path or place.transform_descriptors is not None:
                raise ValueError(f"tensor {name!r}: got {place.relative_path!r}, expected a plain file of the folder")
            box = tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))
            chunks.append(_Chunk(box, folder / place.relative_path, place.offset, place.length))
            elements += math.prod(sizes)
            if any(part.stop > size for part, size in zip(box, shape, strict=True)):
                raise ValueError(f"tensor {name!r}: got a part that leads out of {list(shape)}")
        held = sum(path.stat().st_size for path in {chunk.path for chunk in chunks})
        if elements != math.prod(shape) or header.nbytes > held:
            raise ValueError(f"tensor {name!r}: got {elements} elements in {held} bytes, expected {list(shape)}")
        tensor = ChunkedTensor(header, folder / METADATA, 0, name, chunks=tuple(chunks))
        yield tuple(map(str, keys.get(name, (name,)))), tensor


def _saved(chunk: _Chunk, shape: Sizes, dtype: str) -> Tensor:
    """A tensor as `torch.save` wrote it: an archive with a pickle that describes it, and its elements."""
    with chunk.path.open("rb") as file:
        file.seek(chunk.at)
        text = file.read(chunk.nbytes)
    with zipfile.ZipFile(io.BytesIO(text)) as archive:
        files = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        head, data, nbytes = files["data.pkl"], files["data/0"], math.prod(shape) * DTYPE_BYTES[dtype]
        compressed = any(info.compress_type for info in files.values())
        if data.file_size != nbytes or head.file_size > _MOST_HEAD_BYTES or compressed:
            raise ValueError(f"got {data.file_size} bytes, expected {nbytes}, not compressed")
        if "byteorder" in files and archive.read(files["byteorder"]) != b"little":
            raise ValueError("got another byte order, expected little")
        stride = _stride(read_pickled(archive.read(head), _IN_TENSORS), shape, dtype)
        elements = bytearray(archive.read(data))
    flat = torch.frombuffer(elements, dtype=getattr(torch, dtype)) if nbytes else torch.empty(0)
    return flat.as_strided(shape, stride).to(getattr(torch, dtype))


def _stride(value: Any, shape: Sizes, dtype: str) -> Sizes:
    """Return the strides of a tensor whose elements fill its storage."""
    storage, offset, sizes, stride = value["arguments"][:4]
    kind = _STORAGES.get(storage["arguments"][0][1])
    found = msgspec.convert(stride, Sizes)
    if kind != dtype or offset != 0 or sizes != shape or len(found) != len(shape):
        raise ValueError(f"got another tensor, expected {dtype} {list(shape)}")
    if math.prod(shape) <= sum((n - 1) * step for n, step in zip(shape, found, strict=True)):
        raise ValueError("got strides that lead out of it")
    return found


def _sizes(size: _Size | None) -> Sizes:
    return size.arguments[0] if size is not None else ()
