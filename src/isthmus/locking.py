"""One process at a time: a lock on an open file or folder that ends with the process, however that ends."""

from __future__ import annotations

import atexit
import contextlib
import importlib
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import UserError


def locked(handle: int) -> bool:
    """Take the lock of an open file; False while another process has it. ModuleNotFoundError on Windows, where all else
    of the modules that use this can be imported."""
    fcntl = importlib.import_module("fcntl")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(path: Path, taken: str) -> None:
    """This process has the file, which is made where it is missing, for as long as it lives; processes that it forks
    have not. Once more does nothing. UserError: `taken` where another process has it, or for what cannot be opened."""
    claim = _opened(path)
    if not _take(claim):
        claim.close()
        raise UserError(taken)
    _HELD.append(claim)
    atexit.register(claim.close)


def is_held(path: Path) -> bool:
    """Return whether a process, this one too, has the file by `hold`."""
    if not path.exists():
        return False
    if any(Path(claim.name).absolute() == path.absolute() for claim in _HELD):
        return True  # to open and close it would give it up
    with _opened(path) as claim:
        return not _take(claim)


def _take(claim: BinaryIO) -> bool:
    """Take a process's lock of the file, which processes that it forks do not have; False while another has it."""
    fcntl = importlib.import_module("fcntl")
    try:
        fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


_HELD: list[BinaryIO] = []  # a file that is closed is no longer locked


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as e:
        raise UserError(f"{path}: cannot be opened: {e.strerror or e}; remove it: it holds nothing") from None


@contextlib.contextmanager
def claimed(path: Path, taken: str) -> Generator[None]:
    """This process alone holds the file meanwhile, which is made where it is missing. UserError: `taken` while another
    one does, or for what cannot be opened."""
    with _opened(path) as claim:
        if not locked(claim.fileno()):
            raise UserError(taken)
        yield
