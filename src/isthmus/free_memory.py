"""How much memory is left: of the machine, and of the control groups that limit a container or a Slurm job."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the bytes that new processes could take without swapping, at most what each limit on this process's group
    leaves; None where the system does not say."""
    found = [*_group_bytes(), kilobytes(_PROC / "meminfo", "MemAvailable")]
    return min((size for size in found if size is not None), default=None)


def _group_bytes() -> Iterator[int]:
    """Yield what each limit leaves, in both versions of control groups. A group's parents limit it too, and a container
    may see its own group as the root."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            first = controllers != ""  # version 2 has one hierarchy for all controllers, without their names
            names = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
            group = (root := _CONTROL_GROUPS / controllers) / path.strip("/")
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
                limit_bytes, used_bytes = (_number(folder / f"memory.{name}", r"^(\d+)$") for name in names)
                cached_bytes = _number(folder / "memory.stat", rf"^{'total_' * first}inactive_file (\d+)$") or 0
                if limit_bytes is not None and used_bytes is not None:
                    yield max(0, limit_bytes - used_bytes + cached_bytes)


def kilobytes(path: Path, key: str) -> int | None:
    """Return the number of a file of /proc as bytes."""
    found = _number(path, rf"^{key}:\s+(\d+) kB")
    return None if found is None else found << 10


def code_bytes(process: int | str = "self") -> int:
    """Return the bytes in memory of files whose code a process runs, as they are in the files: the system shares them,
    and may drop them. 0 where it does not say."""
    kilobytes_of: dict[str, int] = {}
    code: set[str] = set()
    path = ""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process) / "smaps").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if " " in key:  # the first line of a mapping: addresses, permissions, offset, device, inode, file
                _, permissions, *_, path = line.split(maxsplit=5) if "/" in line else ("", "", "")
                code |= {path} if "x" in permissions else set()
            elif key in ("Rss", "Anonymous"):
                size = int(value.split()[0])
                kilobytes_of[path] = kilobytes_of.get(path, 0) + (size if key == "Rss" else -size)
    return sum(kilobytes_of[path] for path in code) << 10


def _number(path: Path, pattern: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(pattern, path.read_text(errors="replace"), re.MULTILINE):
            return int(found[1])
    return None
