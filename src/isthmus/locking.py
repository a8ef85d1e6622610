"""One process at a time: a lock on an open file or folder that ends with the process, however that ends."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from pathlib import Path

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
