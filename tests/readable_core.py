"""What a new engineer reads in an evening: plans, state machines of a pipeline, engine, host and simulator.

`python -m tests.readable_core` counts its lines, and fails above the limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "isthmus"
PARTS = {
    "plans": ("plans",),
    "state machines of a pipeline": (
        "protocol/worker.py",
        "protocol/compute_lane.py",
        "protocol/feeding.py",
        "protocol/exchange.py",
        "protocol/state_inventory.py",
        "protocol/coordinator.py",
        "protocol/work.py",
        "protocol/recovery.py",
        "protocol/events.py",
        "protocol/coordinator_events.py",
    ),
    "engine": ("training/engine.py",),
    "host": ("runtime/coordinator/host.py",),
    "simulator": ("simulator",),
}
LIMIT = 6000


def lines(part: str) -> int:
    path = SOURCES / part
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, f"{part}: not there"
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


if __name__ == "__main__":
    counted = {name: sum(map(lines, parts)) for name, parts in PARTS.items()}
    total = sum(counted.values())
    print(", ".join(f"{name} {count}" for name, count in counted.items()) + f": {total} lines of {LIMIT}")
    sys.exit(total > LIMIT)
