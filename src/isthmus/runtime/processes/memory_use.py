"""How much memory processes use now."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path

from isthmus.free_memory import kilobytes

_PROC = Path("/proc")


def family_bytes(pid: int) -> int:
    """Return the bytes of a process and all that descend from it. A page that several of them share is counted once in
    all: each counts its part. 0 for a process that is gone, and on systems without /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            text = stat.read_text(errors="replace")
            children[int(text.rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += children[one]
        found += kilobytes(_PROC / str(one) / "smaps_rollup", "Pss") or 0
    return found
