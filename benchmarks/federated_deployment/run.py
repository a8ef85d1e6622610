"""What deployment costs: a round's overhead with three sites on one machine, and a coordinator that is killed.

`python benchmarks/federated_deployment/run.py [--quick] [--json PATH]`

`isthmus serve` and three `isthmus join --site` are processes of their own that talk TLS over loopback. Work is trivial
(a small model on 40 samples a site), so a round lasts as long as everything around the training does. Then the
coordinator is killed with SIGKILL in the middle of a round, and started again with `--resume`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.experiments import RoundHistory
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.units import format_size

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures
from sites import write_job, write_site

LATEST = Path(__file__).parent / "results" / "latest.json"
SITES = ("north", "south", "west")
OVERHEAD_LIMIT_S, RESTART_LIMIT_S = 0.3, 10.0


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One run and one restart. Overhead is a round's time without that of the site that trained longest."""

    algorithm: str
    rounds: int
    round_s: float
    """Medians over the rounds after the first."""
    overhead_s: float
    worst_overhead_s: float
    sent_bytes: int
    received_bytes: int
    restart_s: float
    """After a SIGKILL: from the start of the coordinator's new process to its first committed round."""
    lost_rounds: int
    """Committed ones, which were not there any more."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    machine: str
    results: tuple[Deployment, ...]


def write_files(folder: Path, algorithm: str, rounds: int) -> None:
    write_job(folder / "fed.toml", SITES, algorithm, rounds)
    for number, name in enumerate(SITES):
        write_site(folder / f"{name}.toml", algorithm, seed=number)


def command(folder: Path, log: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{log}.log").open("ab"),
        env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )


def serve(folder: Path, port: int, *more: str) -> subprocess.Popen[bytes]:
    state = str(folder / "fleet")
    where = ["--state", state, "--port", str(port), "--tickets", "0", "--run", str(folder / "run")]
    return command(folder, "serve", "serve", "fed.toml", *where, *more)


def join(folder: Path, name: str, fleet: FleetState) -> subprocess.Popen[bytes]:
    ticket = folder / f"{name}.ticket"
    ticket.touch(0o600)
    ticket.write_text(fleet.ticket())
    site = ["--site", f"{name}.toml", "--name", name, "--state", f"state-{name}", "--ticket-file", ticket.name]
    return command(folder, name, "join", *site)


def soon(condition: Callable[[], object], folder: Path, within_s: float = 120.0) -> float:
    """When it came true."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("\n".join(path.read_text() for path in folder.glob("*.log")))
        time.sleep(0.002)
    return time.monotonic()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Generator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def measured(algorithm: str, rounds: int) -> Deployment:
    with tempfile.TemporaryDirectory() as name:
        return _measured(Path(name), algorithm, rounds)


def _measured(folder: Path, algorithm: str, rounds: int) -> Deployment:
    write_files(folder, algorithm, 1_000_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    fleet = FleetState(folder / "fleet")
    fleet.listens_at((("127.0.0.1", port),))
    processes = [serve(folder, port)]
    with ended(processes):
        soon(lambda: listens(port), folder)
        processes += [join(folder, site, fleet) for site in SITES]
        soon(lambda: newest(folder) >= rounds, folder)
        killed(processes[0])
        lines = RoundHistory(folder / "run" / "rounds.jsonl").lines()[1 : newest(folder) + 1]
        before, began_s = newest(folder), time.monotonic()
        processes.append(serve(folder, port, "--resume"))
        restart_s = soon(lambda: newest(folder) > before, folder) - began_s
        killed(processes[-1])
    (told,) = [x for x in (folder / "serve.log").read_text().splitlines() if x.startswith("resuming")]
    overheads = [line.seconds - line.makespan_s for line in lines]
    return Deployment(
        algorithm=algorithm,
        rounds=len(lines),
        round_s=statistics.median(line.seconds for line in lines),
        overhead_s=statistics.median(overheads),
        worst_overhead_s=max(overheads),
        sent_bytes=round(statistics.median(line.sent_bytes for line in lines)),
        received_bytes=round(statistics.median(line.received_bytes for line in lines)),
        restart_s=restart_s,
        lost_rounds=before + 1 - int(told.rpartition("after ")[2].split()[0]),
    )


def newest(folder: Path) -> int:
    """The last round on disk."""
    return max((int(path.stem.removeprefix("round-")) for path in folder.glob("run/rounds/round-*")), default=-1)


def killed(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def table(results: tuple[Deployment, ...]) -> Table:
    drawn = Table(
        "algorithm",
        "rounds",
        "round",
        "overhead",
        "worst",
        "sent",
        "received",
        "restart",
        "rounds lost",
        title="Three sites on one machine, trivial work",
    )
    for r in results:
        drawn.add_row(
            r.algorithm,
            f"{r.rounds}",
            f"{r.round_s * 1e3:.1f} ms",
            f"{r.overhead_s * 1e3:.1f} ms",
            f"{r.worst_overhead_s * 1e3:.0f} ms",
            format_size(r.sent_bytes),
            format_size(r.received_bytes),
            f"{r.restart_s:.1f} s",
            f"{r.lost_rounds}",
        )
    return drawn


def main() -> int:
    options = options_of(__doc__, LATEST, "one algorithm, 20 rounds").parse_args()
    algorithms, rounds = (("fedavg",), 20) if options.quick else (("fedavg", "scaffold"), 200)
    report = Report(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        results=tuple(measured(algorithm, rounds) for algorithm in algorithms),
    )
    Console(width=120).print(table(report.results))
    write_figures(options.json, report)
    good = all(
        r.overhead_s <= OVERHEAD_LIMIT_S and r.restart_s <= RESTART_LIMIT_S and not r.lost_rounds
        for r in report.results
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
