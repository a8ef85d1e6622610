"""Files and documents that another program wrote, of which any may be damaged: one way to read them, one error.

A pipe may lie in a file's place, JSON may be deeper than a decoder goes, a text may be no UTF-8.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from isthmus.errors import UserError

Decoded = TypeVar("Decoded")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF_SURROGATE = re.compile(f"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}")


def open_file(path: Path) -> BinaryIO:
    """To read it. OSError for what is no file either: a pipe in its place may never end."""
    try:
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  # the caller closes it
    except ValueError as e:  # a null byte in its name
        raise OSError(errno.EINVAL, str(e), str(path)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no file", str(path))
    return file


def read_file(path: Path) -> bytes:
    """OSError as of `open_file`."""
    with open_file(path) as file:
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_json(path: Path, kind: type[Decoded], source: str = "") -> Decoded:
    """The document in a file. FileNotFoundError where there is none; UserError, which begins with `source` (else the
    path), for what cannot be read."""
    source = source or str(path)
    try:
        text = read_file(path)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise UserError(f"{source}: cannot be read: {e.strerror or e}") from None
    return parse_json(text, kind, source)


def parse_json(text: bytes | str, kind: type[Decoded], source: str) -> Decoded:
    """The one way to read JSON that another program wrote. UserError, which begins with `source`, for what is none, or
    of another kind."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as e:
        if half := _HALF_SURROGATE.search(text if isinstance(text, str) else text.decode(errors="replace")):
            raise UserError(
                f"{source}: got {half[0]} alone, half of a surrogate pair: expected whole characters"
            ) from None
        raise _unreadable(source, e) from None


def parse_msgpack(data: bytes, kind: type[Decoded], source: str) -> Decoded:
    """Return the same as `parse_json`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as e:
        raise _unreadable(source, e) from None


def _unreadable(source: str, error: Exception) -> UserError:
    """`error` is msgspec's, a UnicodeDecodeError, of an integer of 5,000 digits, or of depth."""
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
    return UserError(f"{source}: cannot be read: {reason}")


def printable(path: Path | str) -> str:
    """A path as text that can be encoded: a name that is no UTF-8 has escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")
