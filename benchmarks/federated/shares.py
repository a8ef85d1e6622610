"""How much memory processes hold together: proportional shares, so that pages they share count once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TOKEN = "COMPARED_RUN"
"""A variable in the environment of every process that counts, children that left its group included."""
EVERY_S = 0.02


def watch(
    process: subprocess.Popen[bytes], token: str, limit_s: float, seen: Callable[[int], None] = lambda _: None
) -> int:
    """The most that all processes with the token held at once, in bytes, until the process ends. `seen` gets each."""
    most, started_s = 0, time.monotonic()
    while process.poll() is None and time.monotonic() - started_s < limit_s:
        held = sum(_share_bytes(place) for place in _family(token))
        seen(held)
        most = max(most, held)
        time.sleep(EVERY_S)
    return most


def _family(token: str) -> list[Path]:
    wanted = f"{TOKEN}={token}".encode()
    found: list[Path] = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (place / "environ").read_bytes():
                found.append(place)
    return found


def _share_bytes(place: Path) -> int:
    with suppress(OSError):
        for line in (place / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
