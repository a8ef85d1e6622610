"""One process at a time: a lock on an open file or folder that ends with the process, however that ends."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

from isthmus.errors import UserError


def _system() -> ModuleType | None:
    with contextlib.suppress(ImportError):
        return importlib.import_module("fcntl")
    return None


_FCNTL = _system()
"""None on Windows."""


def locked(handle: int) -> bool:
    """Take the lock of an open file; False while another process has it. UserError where the system has no such
    locks."""
    if _FCNTL is None:
        raise UserError("file locks: got a system without them (fcntl), expected Linux or macOS: on Windows use WSL")
    try:
        _FCNTL.flock(handle, _FCNTL.LOCK_EX | _FCNTL.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def claimed(path: Path, taken: str) -> Generator[None]:
    """This process alone holds the file meanwhile, which is made where it is missing. UserError: `taken` while another
    one does, or for what cannot be opened."""
    try:
        claim = path.open("ab")
    except OSError as e:
        raise UserError(f"{path}: cannot be opened: {e.strerror or e}; remove it: it holds nothing") from None
    with claim:
        if not locked(claim.fileno()):
            raise UserError(taken)
        yield
