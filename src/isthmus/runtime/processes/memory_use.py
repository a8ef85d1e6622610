"""How much memory processes use now, and how much is left."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from pathlib import Path

_PROC = Path("/proc")


def available_bytes() -> int | None:
    """Return the bytes that new processes could take without swapping; None where the system does not say."""
    return _kilobytes(_PROC / "meminfo", "MemAvailable")


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
        found += _kilobytes(_PROC / str(one) / "smaps_rollup", "Pss") or 0
    return found


def _kilobytes(path: Path, key: str) -> int | None:
    """Return the number as bytes."""
    with contextlib.suppress(OSError):
        if line := re.search(rf"^{key}:\s+(\d+) kB", path.read_text(errors="replace"), re.MULTILINE):
            return int(line[1]) << 10
    return None
