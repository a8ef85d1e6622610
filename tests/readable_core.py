"""What a new engineer reads in an evening: plans, the kernel of the machines and the worker, engine, host, simulator.

`python -m tests.readable_core` counts its lines, and fails above the limit, or where any file of src is longer than a
page may be.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "isthmus"
PARTS = {
    "plans": ("plans",),
    "kernel of the machines, and the worker": (
        "protocol/machine.py",
        "protocol/worker.py",
        "protocol/worker_phases.py",
        "protocol/events.py",
        "protocol/work.py",
        "protocol/exchange.py",
        "protocol/compute_lane.py",
    ),
    "engine": ("training/engine.py",),
    "host": ("runtime/coordinator/host.py",),
    "simulator": ("simulator",),
}
LIMIT = 6000
LONGEST = 500
"""Lines of any file of src."""


def lines(part: str) -> int:
    path = SOURCES / part
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, f"{part}: not there"
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


if __name__ == "__main__":
    counted = {name: sum(map(lines, parts)) for name, parts in PARTS.items()}
    total = sum(counted.values())
    print(", ".join(f"{name} {count}" for name, count in counted.items()) + f": {total} lines of {LIMIT}")
    long = [str(file.relative_to(SOURCES)) for file in sorted(SOURCES.rglob("*.py")) if lines(str(file)) > LONGEST]
    print(f"files of more than {LONGEST} lines: {', '.join(long) or 'none'}")
    sys.exit(total > LIMIT or bool(long))
