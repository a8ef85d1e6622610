"""Files that only their owner may read."""

from __future__ import annotations

import stat
from pathlib import Path

from isthmus.atomic_write import atomic_write
from isthmus.errors import UserError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def private_folder(path: Path) -> Path:
    """The folder, made with mode 0700 if missing. UserError when others may look into it, or it cannot be made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"state folder {path}: cannot be made: {e.strerror or e}") from None
    _refuse_open(path, "state folder", "0700")
    return path


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file as `atomic_write` does, with mode 0600. UserError if it cannot be written."""
    try:
        atomic_write(path, data, private=True, durable=durable)
    except OSError as e:
        remedy = ": remove it" if path.is_dir() else ""
        raise UserError(f"{path}: cannot be written: {e.strerror or e}{remedy}") from None


def read_private(path: Path, what: str, remedy: str = "") -> bytes:
    """A file with a secret in it; UserError when it cannot be read, or others may read it."""
    try:
        found = path.read_bytes()
    except OSError as e:
        reason = f"{what} {path}: cannot be read: {e.strerror or e}"
        raise UserError(f"{reason}: {remedy}" if remedy else reason) from None
    _refuse_open(path, what, "0600")
    return found


def _refuse_open(path: Path, what: str, expected: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        raise UserError(f"{what} {path}: got mode {mode:04o}, expected {expected}: other users could read a secret")
