"""Files that are written whole or not at all: a process that is killed meanwhile leaves the previous file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from pathlib import Path


def atomic_write(path: Path, data: bytes | memoryview, *, private: bool = False, durable: bool = True) -> None:
    """Replace the file's content; arguments and errors as of `atomic_path`."""
    with atomic_path(path, private=private, durable=durable) as new:
        new.write_bytes(data)


@contextlib.contextmanager
def atomic_path(path: Path, *, private: bool = False, durable: bool = True) -> Generator[Path]:
    """An empty file beside `path`, to be written by the block; it replaces `path` when the block ends without an error.

    With `durable`, a machine that loses power leaves the previous file or the new one, and the new one once this has
    returned. `private` files have mode 0600, others follow the umask. Two writers of one path do not meet. OSError
    when it cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    new.unlink(missing_ok=True)  # left by a process of the same number that was killed
    try:
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
        mode = new.stat().st_mode & 0o777
        yield new
        new.chmod(mode)  # safetensors makes files that their owner alone can read
        if durable:
            flush(new)
        new.replace(path)
        if durable:
            flush(path.parent)
    finally:
        new.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Return when the file, or the names in the folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
