"""The folder that a pretrained model is loaded from: what its index says is held against its files, and that of a model
in a store is made here, of its config and of the headers of its weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec
from safetensors import SafetensorError, safe_open

from isthmus.errors import UserError, warn
from isthmus.safetensors_header import MOST_HEADER_BYTES, Entry, read_header
from isthmus.stores import Store, StoreFile

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_SMALL = (CONFIG, "generation_config.json")
_FLOATS = {"F64", "F32", "F16", "BF16"}


class _Metadata(msgspec.Struct, frozen=True):
    total_size: object = None


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: _Metadata = _Metadata()


def check_folder(folder: Path, shown: str) -> None:
    """UserError, in which `shown` is the folder, unless each file of weights is whole and has the tensors that the
    index names in it. A wrong total size harms nobody: it is said."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        for path in sorted(folder.glob("*.safetensors")):
            _entries(path, shown)
        return
    index = _index((folder / INDEX).read_bytes(), shown)
    there = {name: _entries(folder / name, shown) for name in sorted(set(index.weight_map.values()))}
    for tensor, name in index.weight_map.items():
        if tensor not in there[name]:
            raise UserError(f"{shown}/{INDEX}: weight_map: got {name!r} for {tensor!r}, which has no such tensor")
    said = index.metadata.total_size
    found = sum(e.data_offsets[1] - e.data_offsets[0] for entries in there.values() for e in entries.values())
    if said is not None and said != found:
        warn(f"{shown}/{INDEX}: total_size: got {said}, expected {found}, as the files have: taken from the files")


def fetch_folder(url: str, folder: Path, weights: Literal["none", "headers", "all"]) -> dict[Path, StoreFile]:
    """Make the folder of a model at a URL. Returns the files of weights; with `headers` each has its length and a hole
    for values of floating-point types. UserError for a store that does not answer, or has no such model."""
    store, found = Store(url), dict[Path, StoreFile]()
    for name in _SMALL[: 1 if weights == "none" else None]:
        if (text := store.read(name, small=True)) is not None:
            (folder / name).write_bytes(text)
        elif name == CONFIG:
            raise UserError(f"{url}: no {CONFIG} there, expected the folder of a model that transformers saved")
    for file in _files(store, folder) if weights != "none" else ():
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        found[path] = file
        with path.open("wb") as out:
            if weights == "all":
                for piece in file.pieces(0, file.size):
                    out.write(piece)
                continue
            size = int.from_bytes(_read(file, 0, 8), "little")
            if size > min(MOST_HEADER_BYTES, file.size - 8):
                raise UserError(f"{url}/{file.name}: no safetensors file, or truncated in its header")
            out.write(_read(file, 0, 8 + size))
            out.truncate(file.size)
        _fill_others(file, path, 8 + size)
    return found


def _files(store: Store, folder: Path) -> list[StoreFile]:
    url = store.url
    if (single := StoreFile.found(url, WEIGHTS)) is not None:
        return [single]
    if (text := store.read(INDEX, small=True)) is None:
        raise UserError(f"{url}: neither {WEIGHTS} nor {INDEX} there, expected safetensors weights")
    (folder / INDEX).write_bytes(text)
    found: list[StoreFile] = []
    for name in sorted(set(_index(text, url).weight_map.values())):
        if (file := StoreFile.found(url, name)) is None:
            raise UserError(f"{url}/{INDEX}: weight_map: got {name!r}, which is not there")
        found.append(file)
    return found


def _index(text: bytes, shown: str) -> _Index:
    try:
        index = msgspec.json.decode(text, type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise UserError(f"{shown}/{INDEX}: {e}: expected weight_map, a table from tensors to files") from None
    for tensor, name in index.weight_map.items():
        parts = PurePosixPath(name).parts
        if not name.endswith(".safetensors") or ".." in parts or name.startswith("/") or {"\\", ":"} & set(name):
            raise UserError(
                f"{shown}/{INDEX}: weight_map: got {name!r} for {tensor!r}, expected a .safetensors file of the folder"
            )
    return index


def _entries(path: Path, shown: str) -> Mapping[str, Entry]:
    """The header of a file of weights, whose tensors lie within it."""
    where = f"{shown}/{path.name}"
    try:
        found, _, there = read_header(path)
    except OSError as e:
        raise UserError(f"{where}: cannot be read: {e.strerror or e}") from None
    except ValueError:
        raise UserError(f"{where}: truncated, or no safetensors file: its header cannot be read") from None
    needed = max((e.data_offsets[1] for e in found.values()), default=0)
    if needed > there:
        raise UserError(f"{where}: truncated, or no safetensors file: got {there} bytes of tensors, expected {needed}")
    try:
        with safe_open(path, "pt"):
            return found
    except SafetensorError as e:  # a type that it does not know, tensors that overlap
        raise UserError(f"{where}: no sound safetensors file: {e}") from None


def _fill_others(file: StoreFile, path: Path, begins: int) -> None:
    """Values that are loaded as they are: there are few."""
    entries = _entries(path, file.url)
    spans = [e.data_offsets for e in entries.values() if e.dtype not in _FLOATS]
    wanted = [(begins + start, memoryview(bytearray(end - start))) for start, end in spans if end > start]
    if not wanted:
        return
    file.fill(wanted)
    with path.open("r+b") as out:
        for at, value in wanted:
            out.seek(at)
            out.write(value)


def _read(file: StoreFile, start: int, end: int) -> bytes:
    return b"".join(file.pieces(start, min(end, file.size)))
