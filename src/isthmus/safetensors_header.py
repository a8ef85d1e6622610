"""The header of a safetensors file: eight bytes with its length, and JSON of a table of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
Size = Annotated[int, Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]  # from the end of the header


class Header(NamedTuple):
    entries: dict[str, Entry]
    end: int  # in the file
    held_bytes: int  # that follow it


def read_header(path: Path) -> Header:
    """Raises OSError for what cannot be read, ValueError for what is no header, or ends within it."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size <= MOST_HEADER_BYTES else b""
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        found = {name: msgspec.json.decode(raw, type=Entry) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(str(e)) from None
    return Header(found, 8 + size, path.stat().st_size - 8 - size)
