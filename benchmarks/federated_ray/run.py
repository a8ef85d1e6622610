"""How many bytes of clients' states move between two nodes of a Ray cluster that have a disk of their own each.

python benchmarks/federated_ray/run.py [--quick] [--json PATH]
"""

from __future__ import annotations

import os

# Read when Ray is imported: its network is this machine's loopback.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", RAY_AUTH_MODE="disabled"
)

import statistics
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from isthmus import FederatedJob
from isthmus.experiments import FederatedRun, RoundLine

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

FIGURES = Path(__file__).parent / "results" / "latest.json"
CLIENTS = 6
ROUNDS = 20
WIDTH = 3308
"""Of two hidden layers: 11.2 million parameters, as many as a ResNet-18 has."""
DISK = "ISTHMUS_BENCHMARK_DISK"
STORE_BYTES = 1 << 30


class Row(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    rounds: int
    state_mb: float
    """Of one client."""
    trained: int
    """Clients, in all rounds: each reads its state but in its first round, and writes it."""
    moved_mb: float
    """Of states, from node to node."""
    round_s: float
    """Median."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    rows: tuple[Row, ...]


CASES: dict[str, dict[str, object]] = {
    "the schedule stays": {"scheme": "ours", "steals": False},
    "idle executors steal": {"scheme": "ours"},
}
"""A stolen client brings its state where the time that is saved is worth the move."""


def job_of(execution: dict[str, object], rounds: int, width: int) -> FederatedJob:
    document = {
        "name": "states",
        "model": {"name": "mlp", "options": {"features": 64, "width": width, "layers": 2, "classes": 10}},
        "data": {"kind": "digits", "options": {"flat": True, "holdout": 0.9}},
        "federated": {
            "algorithm": "scaffold",
            "rounds": rounds,
            "partition": {"scheme": "iid", "clients": CLIENTS},
            "participation": {"clients": CLIENTS},
        },
        "training": {"epochs": 1, "batch_size": 32, "eval_every": 0, "save_every": 5},
        "runtime": {"backend": "ray", "executors": 2, "ray": {"states": f"${DISK}/states"}, **execution},
    }
    return msgspec.convert(document, FederatedJob)


@contextmanager
def cluster(folder: Path) -> Generator[None]:
    """Two nodes, each with its folder in an environment variable."""
    os.environ["RAY_TMPDIR"] = str(folder)
    made = Cluster(shutdown_at_exit=True)
    for node in ("one", "two"):
        os.environ[DISK] = str(folder / node)
        head = {} if made.head_node else {"include_dashboard": False, "no_monitor": True}
        made.add_node(num_cpus=1, object_store_memory=STORE_BYTES, node_ip_address="127.0.0.1", **head)
    try:
        yield
    finally:
        made.shutdown()


def measured(case: str, rounds: int, width: int) -> Row:
    lines: list[RoundLine] = []
    with tempfile.TemporaryDirectory(prefix="ray-") as place, cluster(Path(place)):
        run = FederatedRun(job_of(CASES[case], rounds, width), Path(place) / "run", resume=False, watch=lines.append)
        run.run(lambda note: print(note, file=sys.stderr, flush=True))
    return Row(
        case=case,
        rounds=rounds,
        state_mb=run.server.values["model"].nbytes / 1e6,
        trained=sum(line.clients for line in lines),
        moved_mb=run.moved_bytes / 1e6,
        round_s=statistics.median(line.seconds for line in lines),
    )


def main() -> None:
    parser = options_of(__doc__, FIGURES, "five rounds of a small model")
    quick = (options := parser.parse_args()).quick
    rows = [measured(case, 5 if quick else ROUNDS, 64 if quick else WIDTH) for case in CASES]
    write_figures(options.json, found := Report(host=machine(), rows=tuple(rows)))
    table = Table(
        "case", "rounds", "a state", "clients trained", "moved", "round", title=f"Client states, {found.host}"
    )
    for row in rows:
        moved, seconds = f"{row.moved_mb:.1f} MB", f"{row.round_s:.2f} s"
        table.add_row(row.case, str(row.rounds), f"{row.state_mb:.1f} MB", str(row.trained), moved, seconds)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
