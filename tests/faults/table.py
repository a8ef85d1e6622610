"""`make test-faults`: each fault at many moments, over real processes; prints how long recovery took.

Moments are drawn from the seed: after how many steps, and how long after that. A run that ends otherwise than it should
or, where the cuts are equal, with other weights than an undisturbed one is named with its seed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from .real import Run, job, pid_of, run

STEPS = 24


class Fault(NamedTuple):
    name: str
    act: Callable[[str], None]
    """What is done to a device."""
    spares: int
    options: dict[str, object]


def _kill(device: str) -> None:
    os.kill(pid_of(device), signal.SIGKILL)


def _stop(device: str) -> None:
    pid = pid_of(device)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(12)
    os.kill(pid, signal.SIGCONT)


FAULTS = (
    Fault("killed, a spare takes its place", _kill, 1, {}),
    Fault("killed, the other goes on alone", _kill, 0, {}),
    Fault("killed, no snapshots: from the checkpoint", _kill, 1, {"snapshots": False, "save_every": 6}),
    Fault("stopped for 12 s, evicted after 4 s", _stop, 1, {"patience": "4 s"}),
)


def _once(fault: Fault, seed: int, folder: Path) -> Run:
    draw = random.Random(seed)
    device, step, later_s = draw.choice(("d0", "d1")), draw.randint(1, STEPS - 6), draw.uniform(0.0, 0.3)

    def act() -> None:
        time.sleep(later_s)
        fault.act(device)

    return run(folder, job(STEPS, **fault.options), spares=fault.spares, act=(step, act))  # type: ignore[arg-type]


def _wrong(fault: Fault, found: Run, expected: Run) -> str:
    if found.outcome.outcome != "done":
        return found.outcome.reason
    if sorted({step for step, _ in found.losses}) != list(range(STEPS)):
        return "a step is missing"
    equal = all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
    return "" if equal or not fault.spares else "other weights"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong: list[str] = []
    table = Table("fault", "runs", "recovery, median", "longest", "steps done again, mean", title="Faults, 2 devices")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        expected = run(folder / "undisturbed", job(STEPS), spares=0)
        for number, fault in enumerate(FAULTS):
            recoveries = []
            for moment in range(options.moments):
                seed = options.seed + 1000 * number + moment
                found = _once(fault, seed, folder / str(seed))
                recoveries += found.outcome.recoveries
                if reason := _wrong(fault, found, expected):
                    wrong.append(f"{fault.name}, seed {seed}: {reason}")
            seconds = [r.seconds for r in recoveries] or [0.0]
            again = statistics.mean([r.redone for r in recoveries] or [0])
            table.add_row(
                fault.name, str(options.moments), f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s",
                f"{again:.1f}",
            )  # fmt: skip
    Console(width=120).print(table)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
