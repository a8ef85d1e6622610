"""The page: what it costs a run that somebody looks at it, and how soon it shows half a million spans.

`python benchmarks/dashboard/run.py [--quick] [--json PATH]`

The same run with `--dashboard` and a client that does what an open page does, and without, in turns: three emulated
devices. What counts is the median time of a step over all runs of a kind, without the first two and the last one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import isthmus
from isthmus.trace import step_times

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
LIMIT = 0.01
SPANS = 500_000
JOB = """
name = "watched"
fleet = "{folder}/fleet.toml"
[model]
name = "gpt"
options = {vocab_size = 256, sequence_length = 32, width = 32, layers = 3, heads = 2}
[data]
kind = "text"
options = {files = "stdlib", sequence_length = 32, max_bytes = 100000}
[training]
batch_size = 16
micro_batches = 8
[runtime]
adapt = false
"""
FLEET = """
name = "three"
[[device]]
name = "slow"
region = "here"
compute = "45 MFLOPS"
memory = "1 GiB"
count = 3
[links]
intra = {latency = "5 ms", bandwidth = "100 Mbit/s"}
"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    steps: int
    alone_s: tuple[float, ...]
    """Steps of all runs without a page."""
    watched_s: tuple[float, ...]
    """Steps of all runs with a page that is open."""
    answers: tuple[int, ...]
    """Documents that the page got in each run."""
    opened_s: float
    """From the first request to the bars of a step, of a run of half a million spans, by a server that has just
    begun."""
    opened_cpu_s: float
    """Of it, the server's work."""

    @property
    def cost(self) -> float:
        return statistics.median(self.watched_s) / statistics.median(self.alone_s) - 1


def get(address: str, what: str) -> bytes:
    with urllib.request.urlopen(f"{address}api/{what}", timeout=60) as answer:
        return answer.read()


def follow(address: str) -> None:
    """Do what an open page does: with each event ask for the run, its last moment and the bars of the last step. Prints
    the number of answers."""
    os.nice(19)  # a browser's work is not the run's machine's
    answers = 0
    try:
        run = ""
        while not run:
            run = next((found["id"] for found in json.loads(get(address, "runs"))["runs"]), "")
            time.sleep(0.2)
        with urllib.request.urlopen(f"{address}api/changes?run={run}", timeout=60) as events:
            for line in events:
                if line.startswith(b"event"):
                    get(address, f"run?run={run}")
                    step = json.loads(get(address, f"at?run={run}"))["step"]
                    get(address, f"timeline?run={run}&step={max(1, step)}&columns=600")
                    answers += 3
    except OSError:  # the run is over
        pass
    print(answers)


class Noted(isthmus.Observer):
    """Starts a client once the page's address is known."""

    def __init__(self) -> None:
        self.client: subprocess.Popen[bytes] | None = None

    def note(self, text: str) -> None:
        if text.startswith("dashboard: "):
            address = text.removeprefix("dashboard: ")
            self.client = subprocess.Popen([sys.executable, __file__, "--follow", address], stdout=subprocess.PIPE)


def one_run(folder: Path, steps: int, *, watched: bool) -> tuple[list[float], int]:
    """Seconds of the steps, and how many documents a client got."""
    observer = Noted()
    run = isthmus.train(
        folder / "job.toml",
        run=folder / f"run-{time.monotonic_ns()}",
        overrides={"training.steps": steps},
        observer=observer,
        dashboard=watched,
    )
    answers = 0
    if observer.client is not None:
        answers = int(observer.client.communicate(timeout=60)[0])
    times = sorted(step_times(run.trace).items())
    return [seconds for _, seconds in times[2:-1]], answers


def cpu_s(pid: int) -> float:
    """That a process has used so far."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def opened(run: Path) -> tuple[float, float]:
    """Seconds until a page has all that it draws, of half a million spans, and the server's work in them."""
    trace = run / "trace.jsonl"
    head, *lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join([head, *(lines * (SPANS // len(lines) + 1))[:SPANS]]))
    command = [sys.executable, "-m", "isthmus", "dashboard", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    address = server.stdout.readline().decode().strip()
    while True:  # it listens before it answers
        try:
            get(address, "runs")
            break
        except OSError:
            time.sleep(0.05)
    began_s, used_s = time.monotonic(), cpu_s(server.pid)
    for what in ("run?", "at?", "timeline?step=3&"):
        get(address, f"{what}run={run.name}")
    took_s, worked_s = time.monotonic() - began_s, cpu_s(server.pid) - used_s
    server.terminate()
    server.wait()
    return took_s, worked_s


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer steps, one run of each kind")
    parser.add_argument("--follow", metavar="ADDRESS", help="be the client of a page")
    options = parser.parse_args()
    if options.follow:
        follow(options.follow)
        return 0
    steps, turns = (8, 1) if options.quick else (18, 4)
    times: dict[bool, list[float]] = {False: [], True: []}
    answers: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.replace("{folder}", name))
        (folder / "fleet.toml").write_text(FLEET)
        for turn in range(turns):
            for watched in (False, True) if turn % 2 == 0 else (True, False):
                found, count = one_run(folder, steps, watched=watched)
                times[watched] += found
                answers += [count] * watched
                kind = "watched" if watched else "alone"
                print(f"  {kind}: median {statistics.median(found):.4f} s", file=sys.stderr)
        opened_s, opened_cpu_s = opened(max(folder.glob("run-*")))
    report = Report(
        when=datetime.now(UTC).strftime("%Y-%m-%d"),
        host=machine(),
        steps=steps,
        alone_s=tuple(times[False]),
        watched_s=tuple(times[True]),
        answers=tuple(answers),
        opened_s=opened_s,
        opened_cpu_s=opened_cpu_s,
    )
    write_figures(options.json, report)
    table = Table("step alone", "with the page open", "cost", "documents", f"{SPANS:,} spans", "of it work")
    alone, watched_s = (statistics.median(found) for found in (report.alone_s, report.watched_s))
    documents = f"{statistics.median(answers):.0f} per run"
    table.add_row(
        f"{alone:.4f} s",
        f"{watched_s:.4f} s",
        f"{report.cost:+.2%}",
        documents,
        f"{opened_s:.2f} s",
        f"{opened_cpu_s:.2f} s",
    )
    Console().print(table)
    return int(report.cost > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
