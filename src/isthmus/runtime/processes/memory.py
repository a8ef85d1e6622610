"""The memory of a process: a bound on it, where no other program is to lose its own, and freed pages, which stay.

glibc gives large blocks back to the system at once, and the top of its heap when it has grown. A process that allocates
the same vectors round after round then pays for zeroed pages every time (measured here: a copy of 45 MB into new pages
took 63 ms, over old ones 4 ms).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

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
    # pyarrow's own allocator reserves 1 GiB, which counts. It is read when pyarrow is imported, with the first data.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
ANY_SIZE = 2**31 - 1  # mallopt takes a C int


def keep_freed_pages(largest_bytes: int = 32 << 20, arenas: int = 0) -> None:
    """From now on, in this process and in copies made of it. Where the C library is not glibc, nothing changes.

    Blocks beyond `largest_bytes` go back to the system when they are freed: where sizes change, gaps that large ones
    leave may never fit again. `arenas` limits the separate heaps of threads: a thread's own keeps pages that no other
    thread can use. 0: as many as there are by default.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    adjust = cast(Callable[[int, int], int], mallopt)
    adjust(_MMAP_THRESHOLD, largest_bytes)
    adjust(_TRIM_THRESHOLD, ANY_SIZE)
    if arenas:
        adjust(_ARENA_MAX, arenas)


SWITCH_S = 0.0005
"""How long a lane waits at most for the interpreter: with Python's 5 ms, what a link brought or took would often wait
longer for the compute lane to let go than it travels on a local network."""


def tune_process() -> None:
    """Make this process one that computes and communicates at the same time, over and over the same."""
    sys.setswitchinterval(SWITCH_S)
    keep_freed_pages()
