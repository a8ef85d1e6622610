"""Federated rounds against Flower, pfl, a bare loop, and the least pool: same model, clients, batches, weights.

`python benchmarks/federated/run.py [--quick] [--json PATH] [--only WORKLOAD] [--sides NAME ...] [--memory]`

Every side is a process of its own that trains the same cohorts from the same weights, in turn, several times over. A
round's time is from the end of the one before, where there are many the mean of five after one another (an end is told
beside the next round, so single ones come early or late); the median is over rounds 2 to n of all repeats. `--memory`
looks at memory, and compares the weights after a few rounds with the bare loop's. Rows of workloads that are not run
again stay in the results file.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from sides import SIDES, Ran, Side, run
from task import DEVICE
from workloads import WORKLOADS, Workload, write

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
QUICK = ("bare loop", "ours, 1 executor", "pool of 2", "ours, 2 executors", "ours, 2, vectorised")

HEADINGS = (
    "round",
    "quickest",
    "bare / it",
    "Flower / it",
    "whole",
    "Flower / it",
    "memory",
    "of Flower's",
    "weights off",
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A side on a workload."""

    workload: str
    side: str
    when: str
    round_s: float
    """Median over rounds 2 to n of all repeats."""
    quickest_s: float
    """The least of the same rounds: what the machine's other work disturbs least."""
    wall_s: float
    """The least of the whole runs'."""
    rounds: int
    clients_per_vmap: int = 1
    memory_bytes: int = 0
    distance: float | None = None
    """After a few rounds: of the weights from the bare loop's, over the way that they went."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    rows: tuple[Row, ...]


def main() -> int:
    parser = options_of(__doc__, LATEST, "without the peers, the MLP with 100 clients only")
    parser.add_argument("--only", choices=sorted(WORKLOADS), action="append", help="workloads, one or more")
    every = [side.name for side in SIDES]
    parser.add_argument("--sides", nargs="+", choices=every, metavar="NAME", help=f"some of {'; '.join(every)}")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--memory", action="store_true", help="memory and weights in place of times, in fewer rounds")
    parser.add_argument("--device", default="cpu", help="where clients train; beside the CPU give --json, --sides too")
    options = parser.parse_args()
    os.environ[DEVICE] = options.device
    names = options.sides or (QUICK if options.quick else every)
    sides = [side for side in SIDES if side.name in names]
    before = msgspec.json.decode(options.json.read_bytes(), type=Report).rows if options.json.is_file() else ()
    rows = {(row.workload, row.side): row for row in before}
    for name in options.only or (["MLP, 100 clients"] if options.quick else WORKLOADS):
        workload = WORKLOADS[name]
        if options.memory:
            for side, (held, distance) in look(workload, sides).items():
                if (name, side) in rows:
                    rows[name, side] = msgspec.structs.replace(rows[name, side], memory_bytes=held, distance=distance)
            continue
        for row in measure(name, workload, sides, options.repeats or workload.repeats):
            old = rows.get((name, row.side))
            if old is not None:
                row = msgspec.structs.replace(row, memory_bytes=old.memory_bytes, distance=old.distance)
            rows[name, row.side] = row
    order = [(w, s.name) for w in WORKLOADS for s in SIDES]
    found = Report(
        host=machine(),
        rows=tuple(rows[key] for key in order if key in rows),
    )
    write_figures(options.json, found)
    Console(width=130).print(table(found))
    return 0


def measure(name: str, workload: Workload, sides: Sequence[Side], repeats: int) -> list[Row]:
    """All sides in turn, `repeats` times over."""
    runs: dict[str, list[Ran]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        write(workload, task)
        for repeat in range(repeats):
            for side in sides:
                runs[side.name].append(ran := run(side, task))
                median_s = statistics.median(ran.rounds_s)
                told = f"{median_s * 1e3:.2f} ms, {ran.wall_s:.1f} s"
                print(f"{name}, {side.name}, {repeat + 1}: {told}", file=sys.stderr)
    return [
        Row(
            workload=name,
            side=side,
            when=datetime.now(UTC).isoformat(timespec="minutes"),
            round_s=statistics.median(s for ran in found for s in ran.rounds_s),
            quickest_s=min(s for ran in found for s in ran.rounds_s),
            wall_s=min(ran.wall_s for ran in found),
            rounds=workload.rounds,
            clients_per_vmap=found[0].clients_per_vmap,
        )
        for side, found in runs.items()
    ]


def look(workload: Workload, sides: Sequence[Side]) -> dict[str, tuple[int, float]]:
    """The most that a side's processes hold in a few rounds, and how far its weights then are from the bare loop's."""
    short = msgspec.structs.replace(workload, rounds=workload.memory_rounds)
    with tempfile.TemporaryDirectory() as folder:
        write(short, Path(folder))
        start = np.load(Path(folder) / "weights.npy")
        bare = run(SIDES[0], Path(folder)).weights
        runs = {side.name: run(side, Path(folder), memory=True) for side in sides}
    went = np.linalg.norm(bare - start)
    return {name: (ran.memory_bytes, float(np.linalg.norm(ran.weights - bare) / went)) for name, ran in runs.items()}


def table(found: Report) -> Table:
    drawn = Table("workload", "side", title=f"Federated rounds, {found.host}")
    for heading in HEADINGS:
        drawn.add_column(heading, justify="right")
    rows = {(row.workload, row.side): row for row in found.rows}
    for row in found.rows:
        bare, flower = rows.get((row.workload, "bare loop")), rows.get((row.workload, "Flower"))
        drawn.add_row(
            row.workload,
            row.side + (f" ({row.clients_per_vmap})" if row.clients_per_vmap > 1 else ""),
            f"{row.round_s * 1e3:.2f} ms",
            f"{row.quickest_s * 1e3:.2f} ms",
            _over(bare and bare.round_s, row.round_s),
            _over(flower and flower.round_s, row.round_s),
            f"{row.wall_s:.1f} s",
            _over(flower and flower.wall_s, row.wall_s),
            f"{row.memory_bytes / 1e6:.0f} MB",
            _over(row.memory_bytes, flower and flower.memory_bytes),
            "-" if row.distance is None else f"{row.distance:.0e}",
        )
    drawn.caption = (
        "in brackets: clients trained as one; weights off: distance from the bare loop's over the way it went"
    )
    return drawn


def _over(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "-"


if __name__ == "__main__":
    sys.exit(main())
