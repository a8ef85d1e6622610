"""Text that may quote a file or another party: nothing that it says may steer the terminal."""

from __future__ import annotations

from isthmus.errors import IsthmusError

MOST_SHOWN = 500  # characters of what another party wrote, in one message to people


def sanitize(text: str) -> str:
    """One line: a space for whatever does not print."""
    return "".join(c if c.isprintable() else " " for c in text)


def error_line(error: Exception) -> str:
    """An error's message as one line, without what could steer a terminal: messages quote files and other parties."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, IsthmusError | OSError):
        text = f"internal: {type(error).__name__}: {error} (--debug shows where)"
    return sanitize(text)
