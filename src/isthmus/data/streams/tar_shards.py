"""Tar files in WebDataset's form: members one after another that share the name up to the first dot after its folder
are a sample, the rest of the name, in small letters, is the column. A block is a run of samples. Only members of
columns that are asked for are read.

    cls cls2 id index inx     a whole number as Python's int reads it: `007` is 7, as in webdataset and datasets
    json jsn npy              numbers of any shape, as in both
    txt text                  UTF-8 text
    png jpg ...               encoded images
    all others                no column that can be trained on (npz, pickle, tensors of torch, audio, `.gz`)

A sample that has one column twice is an error, as in both. Left out are folders, what webdataset takes for a shard's
word about itself (`__NAME__`, or a folder of such a name), and with a warning that names them links, names without a
dot (as in both), and names that begin with `.` or `__` (as in datasets).
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import tarfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.data.arrow_numbers import as_numbers
from isthmus.data.dataset import Array, read_npy
from isthmus.data.images.decoding import ENDINGS as IMAGES
from isthmus.data.streams.files import HEAD_BYTES, KIND, Form, Shard, StreamFile, kept, readable
from isthmus.errors import UserError, unknown_name, warn

BLOCK_SAMPLES = 256
BLOCK_BYTES = 8 << 20  # a block has no more of either, or one sample
MOST_TABLES = 32  # tables of members in memory
HEADERS_AHEAD_BYTES, CONTENTS_AHEAD_BYTES = 16 << 10, 1 << 20
"""Bytes that a request for a header reads ahead (small members'), and those of a request for a member (neighbours)."""
_WHOLE = {"cls", "cls2", "id", "index", "inx"}
_NUMBERS = _WHOLE | {"json", "jsn", "npy"}
_TEXTS = {"txt", "text"}
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset leaves out: a shard's description of itself
MOST_NAMED = 3


class _Members(msgspec.Struct, frozen=True):
    """Results of a look through the headers of a shard."""

    columns: dict[str, bytes]
    """Place of each member, int64 [samples, 2]: where its bytes begin and their number; -1 where there is none."""
    ends: bytes  # int64 [blocks]: the sample after each block's last
    digest: str
    dropped: tuple[str, ...] = ()  # some of the members that are part of no sample, and how many those are
    dropped_count: int = 0


class _Listed(msgspec.Struct, frozen=True):
    """A shard in an index of WebDataset's `widsindex`."""

    url: str
    nsamples: Annotated[int, msgspec.Meta(ge=0)]


class _List(msgspec.Struct, frozen=True):
    shardlist: list[_Listed]


def listed_shards(index: StreamFile) -> dict[str, _Listed]:
    """Return the shards by name without the folder. UserError for a file that is no index."""
    with readable(index.url), index.open() as opened:
        found = msgspec.json.decode(opened.read(), type=_List)
    return {posixpath.basename(one.url): one for one in found.shardlist}


class TarShards:
    def __init__(self, files: Sequence[StreamFile], listed: Mapping[str, _Listed] | None = None) -> None:
        """With an index, a shard is looked through when its first sample is read; without, before that."""
        self.files = files
        self._listed = listed
        self._tables: OrderedDict[int, _Members] = OrderedDict()

    @property
    def sizes_are_bytes(self) -> bool:
        return self._listed is None

    def shard(self, file: int, text: str) -> Shard:
        if self._listed is not None:
            one = self._entry(file)
            sizes = tuple(np.diff(_even(one.nsamples), prepend=0).tolist())
            return Shard(sizes, sizes if text else (), hashlib.sha256(msgspec.json.encode(one)).hexdigest())
        members = self._looked_through(file)  # not one of the kept tables: several threads look into files at once
        ends = _of(members.ends)
        text_sizes: list[int] = []
        if text:
            sizes = self._table(members, file, text)[:, 1].clip(min=0) + 1  # a line's end
            text_sizes = [int(part.sum()) for part in np.split(sizes, ends[:-1])]
        return Shard(tuple(np.diff(ends, prepend=0).tolist()), tuple(text_sizes), members.digest)

    def columns(self) -> dict[str, Form]:
        return {name: _form(name) for name in self._members(0).columns}

    def classes(self, name: str) -> int | None:
        return None

    def numbers(self, file: int, block: int, name: str) -> Array:
        first = int(_of(self._members(file).ends)[block - 1]) if block else 0
        contents = enumerate(self.contents(file, block, name), first)
        arrays = [self._number(file, name, sample, content) for sample, content in contents]
        named = f"{KIND} {self.files[file].url} column {name!r}"
        if len({array.shape for array in arrays}) != 1:
            raise UserError(f"{named}: samples differ in shape")
        return as_numbers(np.stack(arrays), named)

    def _number(self, file: int, name: str, sample: int, content: bytes) -> Array:
        with readable(f"{self.files[file].url} column {name!r} (sample {sample})"):
            if name.rpartition(".")[2] in _WHOLE:
                found = np.asarray(int(content))
            elif name.endswith("npy"):
                found = read_npy(io.BytesIO(content), len(content))
            else:
                found = np.asarray(msgspec.json.decode(content.strip()))
            if found.dtype.kind not in "biuf":
                raise ValueError(f"got {found.dtype}, expected numbers")
            return found

    def contents(self, file: int, block: int, name: str) -> list[bytes]:
        ends = _of(self._members(file).ends)
        first = int(ends[block - 1]) if block else 0
        with readable(self.files[file].url), self.files[file].open(CONTENTS_AHEAD_BYTES) as opened:
            places = self._table(self._members(file), file, name)[first : int(ends[block])]
            return [self._content(file, opened, name, first + row, place) for row, place in enumerate(places.tolist())]

    def _content(self, file: int, opened: BinaryIO, name: str, sample: int, place: list[int]) -> bytes:
        begin, size = place
        if begin < 0:
            raise UserError(f"{KIND} {self.files[file].url}: sample {sample} has no {name!r}")
        opened.seek(begin)
        content = opened.read(size)
        if len(content) != size:
            raise UserError(f"{KIND} {self.files[file].url}: ends in the middle of sample {sample}")
        return content

    def _table(self, members: _Members, file: int, name: str) -> NDArray[np.int64]:
        """Places of a column's members."""
        if name not in members.columns:
            raise unknown_name(f"column of {self.files[file].url}", name, members.columns)
        return _of(members.columns[name]).reshape(-1, 2)

    def _members(self, file: int) -> _Members:
        if file not in self._tables:
            self._tables[file] = self._looked_through(file)
            if len(self._tables) > MOST_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(file)
        return self._tables[file]

    def _looked_through(self, file: int) -> _Members:
        found = self.files[file]
        members = kept(found, "tar members", _Members, lambda: _look_through(found))
        if members.dropped_count:
            some = ", ".join(members.dropped) + (", ..." if members.dropped_count > len(members.dropped) else "")
            what = f"{members.dropped_count} members are part of no sample and are left out: {some}"
            warn(f"{KIND} {found.url}: {what}")
        if self._listed is None:
            return members
        samples = int(_of(members.ends)[-1]) if members.ends else 0
        if samples != (expected := self._entry(file).nsamples):
            raise UserError(f"{KIND} {found.url}: got {samples} samples, the index says {expected}")
        return msgspec.structs.replace(members, ends=_even(samples).astype("<i8").tobytes())

    def _entry(self, file: int) -> _Listed:
        assert self._listed is not None, "there is an index"
        name = posixpath.basename(self.files[file].url)
        if name not in self._listed:
            raise UserError(f"{KIND} option 'index': lists no {name}")
        return self._listed[name]


def _even(samples: int) -> NDArray[np.int64]:
    """The ends of blocks where nothing is known of the members."""
    return np.array([*range(BLOCK_SAMPLES, samples, BLOCK_SAMPLES), *([samples] if samples else [])], dtype=np.int64)


def _of(written: bytes) -> NDArray[np.int64]:
    return np.frombuffer(written, dtype="<i8")


def _form(name: str) -> Form:
    ending = name.rpartition(".")[2]
    if ending in _NUMBERS:
        return "numbers"
    if ending in _TEXTS:
        return "text"
    return "image" if f".{ending}" in IMAGES else "other"


def _look_through(file: StreamFile) -> _Members:
    """Reads headers only: it seeks from one to the next."""
    samples: list[dict[str, tuple[int, int]]] = []
    last_key, dropped, dropped_count = "", list[str](), 0
    with readable(file.url), file.open(HEADERS_AHEAD_BYTES) as opened:
        digest = hashlib.sha256(opened.read(HEAD_BYTES))
        opened.seek(0)
        with tarfile.open(fileobj=opened, mode="r:") as archive:
            seen = cast("list[object]", vars(archive)["members"])
            while (member := archive.next()) is not None:
                seen.clear()  # they would all be kept
                found = _named(member)
                if found is None:
                    if not member.isdir() and not _META.match(member.name):
                        dropped_count += 1
                        dropped += [member.name] if len(dropped) < MOST_NAMED else []
                    continue
                key, column = found
                if key != last_key:
                    samples.append({})
                    last_key = key
                if column in samples[-1]:
                    what = f"sample {key!r} has {column!r} twice, expected each name once"
                    raise UserError(f"{KIND} {file.url}: member {member.name}: {what}")
                samples[-1][column] = (member.offset_data, member.size)
                digest.update(f"{member.name}\0{member.offset_data} {member.size} {member.mtime}\n".encode())
    ends = _ends(samples).astype("<i8").tobytes()
    return _Members(_tables(samples), ends, digest.hexdigest(), tuple(dropped), dropped_count)


def _named(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Sample and column of a member; None for one that is no part of a sample."""
    folder, name = posixpath.split(member.name)
    key, dot, column = name.partition(".")
    if not member.isreg() or not key or not dot or name.startswith("__") or _META.match(member.name):
        return None
    if member.issparse():
        raise UserError(f"member {member.name} is sparse, expected one whose bytes lie together")
    return posixpath.join(folder, key), column.lower()


def _tables(samples: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, bytes]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    absent = (-1, 0)
    return {name: np.array([sample.get(name, absent) for sample in samples], dtype="<i8").tobytes() for name in names}


def _ends(samples: Sequence[Mapping[str, tuple[int, int]]]) -> NDArray[np.int64]:
    ends: list[int] = []
    count = size = 0
    for number, sample in enumerate(samples):
        added = sum(length for _, length in sample.values())
        if count and (count == BLOCK_SAMPLES or size + added > BLOCK_BYTES):
            ends.append(number)
            count = size = 0
        count, size = count + 1, size + added
    return np.array([*ends, len(samples)] if samples else [], dtype=np.int64)
