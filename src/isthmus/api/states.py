"""Where a machine keeps what it is in a fleet, and how long it waits for others."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.errors import UserError
from isthmus.units import parse_duration

PORT = 7433  # the coordinator's port
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.1, 86400.0


def timeout_s(text: str) -> float:
    """Read --timeout. UserError for one that no socket could wait, as none or ages."""
    found = parse_duration(text, "--timeout")
    if not LEAST_TIMEOUT_S <= found <= MOST_TIMEOUT_S:
        raise UserError(f"--timeout: got {text!r}, expected 0.1 s to 1 day")
    return found


def state_folder(kind: str) -> Path:
    """Return the folder by the convention of the XDG base directories."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "isthmus" / kind
