"""What federated rounds hold in memory, and what it costs to keep clients' states on disk.

`python benchmarks/federated_memory/run.py [--quick] [--json PATH] [--only schemes|tiny|large] [--disk FOLDER]`

Memory is the sum of the proportional shares of all processes of a run, interpreter and libraries included, looked at
every 20 ms. The cost of states is SCAFFOLD's round over that of a SCAFFOLD whose clients forget theirs. Both run at
once, in slices of time: all processes of one are stopped while the other's run.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "federated"))
from shares import TOKEN, watch  # noqa: E402  # pyright: ignore[reportMissingImports]
from work import Case, Found  # noqa: E402

LATEST = HERE / "results" / "latest.json"
LIMIT_S = 580.0
SELECTED = 1000
SLICE_S = 1.5
"""Short beside the minutes in which a shared machine becomes quicker or slower."""
FEW = {"cnn": (20, 40, 80), "resnet18": (4, 8, 16)}
"""Processes of the SD scheme that were really run; a line through them tells of 1,000."""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    network: str
    scheme: str
    clients: int
    """Selected."""
    memory_bytes: int
    model_bytes: int
    foretold: bool = False
    """By the line through smaller runs."""


class States(msgspec.Struct, frozen=True, kw_only=True):
    setting: str
    state_bytes: int
    forgetful_s: float
    """Median round."""
    kept_s: float
    forgetful_cpu_s: float = 0.0
    """Of all processes, a round."""
    kept_cpu_s: float = 0.0
    early_bytes: int
    """Most memory in the second quarter of the run."""
    late_bytes: int
    """In the last quarter."""

    @property
    def overhead(self) -> float:
        return self.kept_s / self.forgetful_s - 1

    @property
    def cpu_overhead(self) -> float:
        return self.kept_cpu_s / self.forgetful_cpu_s - 1 if self.forgetful_cpu_s else 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    schemes: tuple[Scheme, ...] = ()
    states: tuple[States, ...] = ()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    found: Found
    held: list[tuple[float, int]]
    """(clock, bytes)"""

    @property
    def most(self) -> int:
        return max(h for _, h in self.held)

    def most_between(self, first: float, last: float) -> int:
        """Within a part of the time between the first and the last round."""
        begin, end = self.found.ended_s[0], self.found.ended_s[-1]
        return max(h for at, h in self.held if begin + first * (end - begin) <= at <= begin + last * (end - begin))


def started(case: Case, disk: Path, token: str = "") -> subprocess.Popen[bytes]:
    """In a group of its own."""
    paths = [str(HERE), str(HERE.parent / "federated"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, TOKEN: token, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "work.py"), msgspec.json.encode(case).decode(), str(disk)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, start_new_session=True)


def found_by(process: subprocess.Popen[bytes]) -> Found:
    output = process.communicate(timeout=LIMIT_S)[0]
    if process.returncode:
        raise RuntimeError(f"a run ended with {process.returncode}: see its message above")
    return msgspec.json.decode(output.splitlines()[-1], type=Found)


def measure(case: Case, disk: Path) -> Measured:
    token = secrets.token_hex(8)
    held: list[tuple[float, int]] = []
    process = started(case, disk, token)
    watch(process, token, LIMIT_S, lambda b: held.append((time.monotonic(), b)))
    return Measured(found=found_by(process), held=held)


class Slices:
    """When each of several runs had the machine, on the system's clock."""

    def __init__(self, runs: int) -> None:
        self._of: list[list[tuple[float, float]]] = [[] for _ in range(runs)]

    def give(self, run: int, group: int) -> None:
        begin_s = time.monotonic()
        os.killpg(group, signal.SIGCONT)
        time.sleep(SLICE_S)
        os.killpg(group, signal.SIGSTOP)
        self._of[run].append((begin_s, time.monotonic()))

    def active_s(self, run: int, begin_s: float, end_s: float) -> float:
        return sum(max(0.0, min(end_s, end) - max(begin_s, begin)) for begin, end in self._of[run])

    @property
    def over_s(self) -> float:
        """From here on not all of them ran."""
        return min(slices[-1][1] for slices in self._of)


def in_slices(cases: Sequence[Case], disk: Path) -> list[tuple[Found, list[float]]]:
    """What each run found, and its rounds in seconds in which it had the machine, as long as all ran."""
    processes = [started(case, disk) for case in cases]
    for process in processes:
        os.killpg(process.pid, signal.SIGSTOP)
    slices = Slices(len(cases))
    try:
        while all(process.poll() is None for process in processes):
            for run, process in enumerate(processes):
                slices.give(run, process.pid)
    finally:  # after Ctrl-C, too: they are in groups of their own, and would stay stopped
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
    results: list[tuple[Found, list[float]]] = []
    for run, found in enumerate([found_by(process) for process in processes]):
        ends_s = [end_s for end_s in found.ended_s if end_s <= slices.over_s]
        results.append((found, [slices.active_s(run, *both) for both in itertools.pairwise(ends_s)]))
    return results


def written(writers: int, mean: float, deviation: float) -> dict[str, object]:
    sizes = {"mean": mean, "deviation": deviation, "smallest": round(mean - 2 * deviation), "largest": 1200}
    return {"kind": "femnist", "options": {"writers": writers, **sizes}}


def schemes(network: str, disk: Path, quick: bool) -> list[Scheme]:
    selected = 50 if quick else SELECTED
    base = Case(network=network, data=written(selected, 20, 0), partition=None, clients=selected, rounds=1)
    found: list[Scheme] = []

    def add(case: Case, name: str) -> None:
        measured = measure(case, disk)
        clients = 1 if case.alone else case.clients
        found.append(
            Scheme(
                network=network,
                scheme=name,
                clients=clients,
                memory_bytes=measured.most,
                model_bytes=measured.found.model_bytes,
            )
        )
        print(f"{network}, {name}, {clients} clients: {measured.most / 1e6:.0f} MB", file=sys.stderr)

    add(msgspec.structs.replace(base, alone=True), "one client's training")
    for scheme in ("ours",) if quick else ("sp", "fa", "parrot", "ours"):
        add(msgspec.structs.replace(base, scheme=scheme), scheme)
    few = FEW[network][: 2 if quick else 3]
    for count in few:
        add(msgspec.structs.replace(base, scheme="sd", clients=count), "sd")
    line = np.polyfit(few, [s.memory_bytes for s in found[-len(few) :]], 1)
    found.append(
        Scheme(
            network=network,
            scheme="sd",
            clients=selected,
            memory_bytes=int(np.polyval(line, selected)),
            model_bytes=found[0].model_bytes,
            foretold=True,
        )
    )
    return found


def states(setting: str, base: Case, disk: Path, repeats: int) -> States:
    """Times without anybody looking at memory, then memory."""
    kinds = "forgetful", "scaffold"
    rounds_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        both = in_slices([msgspec.structs.replace(base, algorithm=kind) for kind in kinds], disk)
        for kind, (found, active_s) in zip(kinds, both, strict=True):
            rounds_s[kind] += active_s
            cpu_s[kind].append(found.cpu_s / len(found.rounds_s))
            told = f"{statistics.median(active_s):.3f} s, {cpu_s[kind][-1]:.3f} s of CPU, {len(active_s)} rounds"
            print(f"{setting}, {kind}: {told}", file=sys.stderr)
    looked = measure(msgspec.structs.replace(base, algorithm="scaffold"), disk)
    return States(
        setting=setting,
        state_bytes=looked.found.model_bytes,
        forgetful_s=statistics.median(rounds_s["forgetful"]),
        kept_s=statistics.median(rounds_s["scaffold"]),
        forgetful_cpu_s=statistics.fmean(cpu_s["forgetful"]),
        kept_cpu_s=statistics.fmean(cpu_s["scaffold"]),
        early_bytes=looked.most_between(0.25, 0.5),
        late_bytes=looked.most_between(0.75, 1.0),
    )


def tiny(disk: Path, quick: bool) -> list[States]:
    """States of 3.5 kB: of a million clients nearly none comes twice, of 5,000 nearly all do."""
    found: list[States] = []
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        for clients in (5_000, 50_000 if quick else 1_000_000):
            path = Path(folder) / f"{clients}.npz"
            draws = np.random.default_rng(0)
            labels = draws.integers(10, size=4 * clients)
            centres = draws.normal(size=(10, 16)).astype(np.float16)
            pixels = centres[labels] + draws.normal(size=(4 * clients, 16)).astype(np.float16)
            np.savez(path, pixel_values=pixels, labels=labels)
            case = Case(
                network="tiny",
                data={"kind": "npz", "options": {"path": str(path), "heldout_path": str(path)}},
                partition={"scheme": "iid", "clients": clients},
                clients=1000,
                rounds=6 if quick else 30,
                epochs=5,
                batch_size=4,
            )
            found.append(states(f"{clients:,} clients, 1,000 a round", case, disk, 1 if quick else 2))
    return found


def large(disk: Path, quick: bool) -> list[States]:
    case = Case(network="resnet18", data=written(50, 40, 10), partition=None, clients=10, rounds=4 if quick else 16)
    return [states("ResNet-18, 50 clients, 10 a round", case, disk, 1)]


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer clients and rounds")
    parser.add_argument("--only", choices=("schemes", "tiny", "large"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where states are written")
    options = parser.parse_args()
    before = msgspec.json.decode(options.json.read_bytes(), type=Report) if options.json.is_file() else None
    found = [] if before is None else list(before.schemes)
    kept = {} if before is None else {s.setting: s for s in before.states}
    if options.only in (None, "schemes"):
        networks = ("cnn",) if options.quick else ("cnn", "resnet18")
        found = [s for network in networks for s in schemes(network, options.disk, options.quick)]
    if options.only in (None, "tiny"):
        kept |= {s.setting: s for s in tiny(options.disk, options.quick)}
    if options.only in (None, "large"):
        kept |= {s.setting: s for s in large(options.disk, options.quick)}
    report = Report(
        when=datetime.now(UTC).date().isoformat(),
        host=machine(),
        schemes=tuple(found),
        states=tuple(kept.values()),
    )
    write_figures(options.json, report)
    console = Console(width=120)
    console.print(scheme_table(report.schemes))
    console.print(state_table(report.states))
    return 0


def scheme_table(found: Sequence[Scheme]) -> Table:
    table = Table("model", "scheme", title="Memory of a round, all processes together")
    for column in ("clients", "memory", "of 2.2 x one + model"):
        table.add_column(column, justify="right")
    one = {s.network: s.memory_bytes for s in found if s.scheme == "one client's training"}
    for s in found:
        share = s.memory_bytes / (2.2 * one[s.network] + s.model_bytes)
        mark = " (foretold)" if s.foretold else ""
        table.add_row(s.network, s.scheme, f"{s.clients:,}", f"{s.memory_bytes / 1e6:,.0f} MB{mark}", f"{share:.2f}")
    return table


def state_table(found: Sequence[States]) -> Table:
    table = Table("setting", title="What it costs to keep clients' states")
    times = ("round, forgetful", "kept", "overhead", "CPU, forgetful", "kept", "overhead")
    for column in ("state", *times, "memory early", "late"):
        table.add_column(column, justify="right")
    for s in found:
        table.add_row(
            s.setting,
            f"{s.state_bytes / 1e3:,.1f} kB",
            f"{s.forgetful_s:.3f} s",
            f"{s.kept_s:.3f} s",
            f"{s.overhead:+.1%}",
            f"{s.forgetful_cpu_s:.3f} s",
            f"{s.kept_cpu_s:.3f} s",
            f"{s.cpu_overhead:+.1%}",
            f"{s.early_bytes / 1e6:,.0f} MB",
            f"{s.late_bytes / 1e6:,.0f} MB",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
