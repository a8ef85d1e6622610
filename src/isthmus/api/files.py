"""Files that a command is asked to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isthmus.errors import UserError


def check_folder(option: str, path: Path | None) -> None:
    """Before the work whose result the file is. UserError for a folder that is not there."""
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option} {path}: {path.parent} is not a folder")


def write_file(option: str, path: Path | None, write: Callable[[Path], object]) -> None:
    """If one is asked for. UserError where it cannot be written."""
    if path is None:
        return
    try:
        write(path)
    except OSError as e:
        raise UserError(f"{option} {path}: cannot be written: {e.strerror or e}") from None
