"""A bound on the memory that a process takes: what asks for more gets an error, and no other program loses its own."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def machine_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_memory(more_bytes: int) -> None:
    """From now on this process can allocate so many bytes beyond what it has: then torch raises RuntimeError and Python
    MemoryError, as for want of memory. Only Linux counts it so; elsewhere nothing changes.

    What it can write is counted, and not all addresses: libraries reserve more of them than there is memory.
    """
    if not _STATUS.exists():
        return
    held_bytes = next(int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if "VmData" in line)
    _, most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    wanted_bytes = held_bytes + more_bytes
    if most_bytes == resource.RLIM_INFINITY or wanted_bytes < most_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted_bytes, wanted_bytes))
