"""Text that may quote a file or another party: nothing that it says may steer the terminal."""

from __future__ import annotations

MOST_SHOWN = 500
"""Characters of what another party wrote, in one message to people."""


def sanitize(text: str) -> str:
    """One line: a space for whatever does not print."""
    return "".join(c if c.isprintable() else " " for c in text)
