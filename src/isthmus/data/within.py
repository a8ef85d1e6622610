"""Files that are read for somebody else lie in one folder: real paths are compared, as a link may lead anywhere."""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import UserError

_FOLDER: ContextVar[str | None] = ContextVar("folder", default=None)
_OF_DESCRIPTOR = "/proc/self/fd"


@contextmanager
def confined_to(folder: Path) -> Generator[None]:
    """Until it ends, this thread's `open_file` and `check_within` refuse what does not lie in `folder`, which may be a
    link itself."""
    before = _FOLDER.set(os.path.realpath(folder))
    try:
        yield
    finally:
        _FOLDER.reset(before)


def is_confined() -> bool:
    """Return whether this thread reads for somebody else."""
    return _FOLDER.get() is not None


def open_file(path: str | Path) -> BinaryIO:
    """To read it. UserError for one out of the folder: it is the open file's place that counts, whatever was put under
    its name since. OSError where it cannot be opened."""
    return _open(path, _FOLDER.get())


def opener() -> Callable[[str | Path], BinaryIO]:
    """`open_file` for files that are read later: the folder is the one that this thread is confined to now."""
    return partial(_open, folder=_FOLDER.get())


def _open(path: str | Path, folder: str | None) -> BinaryIO:
    # Opening a pipe blocks until a process writes it, and opening a device may do anything: only files are opened.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if folder is not None:
            own = f"{_OF_DESCRIPTOR}/{descriptor}"
            _refuse_outside(os.path.realpath(own if os.path.isdir(_OF_DESCRIPTOR) else path), folder, path)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise UserError(f"data: {str(path)!r} is no file, expected one: got a pipe, a socket or a device")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_within(path: str | Path) -> None:
    """UserError for a file out of the folder, and for a directory with anything below it that is: libraries that read
    directories follow links."""
    if (folder := _FOLDER.get()) is not None:
        for below in _below(str(path), set()):
            _refuse_outside(os.path.realpath(below), folder, below)


def check_pattern_within(pattern: str) -> None:
    """Do the same as `check_within`, of all that a path or a glob names."""
    if _FOLDER.get() is not None:
        for match in {pattern, *glob.iglob(pattern, recursive=True)}:
            check_within(match)


def _below(path: str, seen: set[str]) -> Iterator[str]:
    """A path, and every link below it."""
    yield path
    real = os.path.realpath(path)
    if real in seen or not os.path.isdir(real):
        return
    seen.add(real)
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            if os.path.islink(link := os.path.join(folder, name)):
                yield from _below(link, seen)


def _refuse_outside(real: str, folder: str, named: str | Path) -> None:
    if not Path(real).is_relative_to(folder):
        raise UserError(
            f"data: {str(named)!r} leads out of this device's data folder, expected files in it: devices of a fleet "
            "read from the folder that their owner named (`isthmus join --data`)"
        )
