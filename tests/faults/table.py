"""`make test-faults`: each fault at many moments, over real processes; prints how long recovery took.

Moments are drawn from the seed. A run that ends otherwise than it should or, where the cuts are equal, with other
weights than an undisturbed one is named with its seed. `ISTHMUS_FAULT_MOMENTS` is how many moments each fault gets
(20), `ISTHMUS_FAULT_STOP_S` how long a device is stopped and a link is cut (60), `ISTHMUS_FAULT_AGAIN_S` for how long
devices are killed again and again (600).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from . import disk_rows, fleet_rows, process_rows
from .process_rows import Found

ROWS: dict[str, Callable[[int, Path], Found]] = {**process_rows.ROWS, **fleet_rows.ROWS, **disk_rows.ROWS}
FEW = ("killed every 15 s, 4 devices", "coordinator's clock an hour ahead", "coordinator's clock an hour behind")
"""Once is enough: they take long, or nothing of them is drawn."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=int(os.environ.get("ISTHMUS_FAULT_MOMENTS", "20")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong: list[str] = []
    table = Table("fault", "moments", "recovery, median", "longest", "steps done again, mean", "", title="Faults")
    with tempfile.TemporaryDirectory() as made:
        for number, (name, once) in enumerate(ROWS.items()):
            if options.only not in name:
                continue
            seeds = [options.seed + 1000 * number + k for k in range(1 if name in FEW else options.moments)]
            found = [_once(name, once, seed, Path(made), wrong) for seed in seeds]
            seconds = [s for f in found for s in f.seconds]
            told = [f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"] if seconds else ["-", "-"]
            again = statistics.mean(f.redone for f in found)
            row = (name, str(len(seeds)), *told, f"{again:.1f}", found[-1].remark)
            print(" | ".join(row), file=sys.stderr, flush=True)
            table.add_row(*row)
    Console(width=140).print(table)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _once(name: str, once: Callable[[int, Path], Found], seed: int, folder: Path, wrong: list[str]) -> Found:
    try:
        found = once(seed, folder)
    except Exception as e:  # a moment that fails is a finding, and the other moments are still of interest
        found = Found([], 0, f"{type(e).__name__}: {e}")
    if found.wrong:
        wrong.append(f"{name}, seed {seed}: {found.wrong}")
    return found


if __name__ == "__main__":
    sys.exit(main())
