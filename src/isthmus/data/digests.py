"""SHA-256 of files' contents. Of large sets they are kept beside the files' sizes and times, and not read again.

Kept in the user's cache folder. An entry counts for the same inode, size and times of change, which nobody can set
back; what changed less than two seconds before it was read is read again, since another change may have the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.atomic_write import atomic_write
from isthmus.errors import UserError
from isthmus.reading import parse_msgpack, read_file

WORTH_BYTES = 64 << 20  # less is read as quickly again
_RACY_NS = 2_000_000_000
_CHUNK_BYTES = 1 << 20
_State = tuple[int, int, int, int]
_Kept = dict[str, tuple[_State, bytes]]


def digests_of(files: Sequence[Path], open_: Callable[[str | Path], BinaryIO]) -> NDArray[np.uint8]:
    """uint8 [files, 32]. UserError for one that cannot be read."""
    found = np.empty((len(files), hashlib.sha256().digest_size), dtype=np.uint8)
    try:
        states = [_state(os.stat(file)) for file in files]
    except OSError as e:
        raise UserError(f"cannot read {e.filename}: {e.strerror}") from e
    large = sum(size for _, size, *_ in states) >= WORTH_BYTES
    kept = _read(_place(files)) if large else {}
    fresh: _Kept = {}
    for row, (file, state) in enumerate(zip(files, states, strict=True)):
        known = kept.get(str(file))
        if known is not None and known[0] == state:
            digest = known[1]
        else:
            begun_ns = time.time_ns()
            state, digest = _digest(file, open_)
            if max(state[2:]) > begun_ns - _RACY_NS:
                state = (0, 0, 0, 0)  # equal to no file's
        fresh[str(file)] = (state, digest)
        found[row] = np.frombuffer(digest, dtype=np.uint8)
    if large and fresh != kept:
        _write(_place(files), fresh)
    return found


def _digest(file: Path, open_: Callable[[str | Path], BinaryIO]) -> tuple[_State, bytes]:
    digest = hashlib.sha256()
    try:
        with open_(file) as opened:
            state = _state(os.fstat(opened.fileno()))
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}") from e
    return state, digest.digest()


def _state(found: os.stat_result) -> _State:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _place(files: Sequence[Path]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    names = hashlib.sha256("\0".join(os.path.abspath(file) for file in files).encode()).hexdigest()
    return Path(base) / "isthmus" / "digests" / f"{names}.msgpack"


def _read(path: Path) -> _Kept:
    try:
        return parse_msgpack(read_file(path), _Kept, str(path))
    except (OSError, UserError):
        return {}


def _write(path: Path, kept: _Kept) -> None:
    """Whole or not at all. Who may not write here reads the files again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, msgspec.msgpack.encode(kept), private=True, durable=False)
