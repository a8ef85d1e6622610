"""Iteration time of every sync mode over emulated links, against torch DDP and the bound max(compute, wire / H).

`python benchmarks/sync/run.py [--quick] [--model gpt|resnet] [--json PATH]`. See README.md for results.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from workload import PERIOD, Case, Kind, Place, Told

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus_testing.lab import Lab, lab_unavailable

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
MODES = ["torch DDP", "s-sgd", "asc-wfbp", "every-step", "local", "outer", "streaming", "partial", "dreamddp", "dream"]
MBIT = 1e6
BANDWIDTHS_BIT_PER_S = (10 * MBIT, 100 * MBIT, 300 * MBIT, 1000 * MBIT)
WORKERS = 4
TIMEOUT_S = 280.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    description: Told
    payload_bytes_per_s: float
    """What TCP can carry of a link."""
    late_s: float
    """How late the emulated links handed packets over, on average."""

    @property
    def compute_s(self) -> float:
        return self.description.modes[0].step_s

    @property
    def wire_s(self) -> float:
        """Per step, of averaging once a period: each worker sends 2 / K of the model to every other one."""
        return 2 / self.case.workers * self.description.size_bytes / self.payload_bytes_per_s / PERIOD

    @property
    def ring_s(self) -> float:
        """As `wire_s` in a ring, which uses one link of each worker."""
        return (self.case.workers - 1) * self.wire_s

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.wire_s)

    def step_s(self, mode: str) -> float:
        return next(figures.step_s for figures in self.description.modes if figures.mode == mode)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    results: list[Result]


def fleet_of(case: Case) -> Fleet:
    devices = tuple(
        Device(name=f"worker-{k}", region="here", flops_per_s=1e12, memory_bytes=8 << 30) for k in range(case.workers)
    )
    link = Link(case.latency_s, case.bandwidth_bit_per_s / 8)
    return Fleet(name="ring", devices=devices, links=Links(default=link, intra=link))


def measure(case: Case) -> Result:
    """One process per worker, each in a network namespace of its own."""
    fleet = fleet_of(case)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, Lab(fleet) as lab:
        running = [
            subprocess.Popen(
                [
                    *lab.command(name),
                    sys.executable,
                    str(HERE / "worker.py"),
                    msgspec.json.encode(
                        Place(case=case, rank=rank, interface="eth0", store=f"{folder}/store")
                    ).decode(),
                ],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank, name in enumerate(fleet.names)
        ]
        try:
            output, _ = running[0].communicate(timeout=TIMEOUT_S)
            for process in running[1:]:
                process.wait(60)
        finally:
            for process in running:
                process.kill()
                process.wait()
        late_s = lab.statistics().mean_lateness_s
        payload = lab.payload_bandwidth_bytes_per_s(*fleet.names[:2])
    return Result(
        case=case, description=msgspec.json.decode(output, type=Told), payload_bytes_per_s=payload, late_s=late_s
    )


def table(results: list[Result]) -> Table:
    drawn = Table("model", "link", title=f"Milliseconds per step, {WORKERS} workers, H = {PERIOD}")
    headings = (
        "compute",
        "wire / H",
        "in a ring",
        *MODES,
        "bound",
        "dream / bound",
        "floor",
        "DDP / dream",
        "local / dream",
        "prediction off by",
    )
    for heading in headings:
        drawn.add_column(heading, justify="right")
    for r in results:
        drawn.add_row(
            r.case.kind,
            f"{r.case.bandwidth_bit_per_s / MBIT:.0f} Mbit/s",
            _ms(r.compute_s),
            _ms(r.wire_s),
            _ms(r.ring_s),
            *[_ms(r.step_s(mode)) for mode in MODES],
            _ms(r.bound_s),
            f"{r.step_s('dream') / r.bound_s:.2f}",
            _ms(r.description.plan.certificate.lower_bound / PERIOD),
            f"{r.step_s('torch DDP') / r.step_s('dream'):.2f}",
            f"{r.step_s('local') / r.step_s('dream'):.2f}",
            f"{statistics.median(errors(r)):.1%}",
        )
    drawn.caption = (
        "bound: max(compute, wire / H); floor: what no assignment of layers undercuts, latencies included (the plan's "
        f"certificate); prediction: median over the modes, of all cases together {_median_error(results):.1%}"
    )
    return drawn


def errors(result: Result) -> list[float]:
    return [abs(f.predicted_s / f.step_s - 1) for f in result.description.modes if f.predicted_s is not None]


def _median_error(results: list[Result]) -> float:
    return statistics.median(error for result in results for error in errors(result))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def main() -> int:
    parser = options_of(__doc__, LATEST, "one model, two links, one period")
    parser.add_argument("--model", choices=("gpt", "resnet"), help="this model only; the others' figures are kept")
    parser.add_argument("--mbit", type=float, help="this link only; the others' figures are kept")
    options = parser.parse_args()
    if (reason := lab_unavailable()) is not None:
        print(f"cannot emulate links here: {reason}", file=sys.stderr)
        return 1
    kinds: list[Kind] = [options.model] if options.model else ["gpt"] if options.quick else ["gpt", "resnet"]
    links = BANDWIDTHS_BIT_PER_S[1:3] if options.quick else BANDWIDTHS_BIT_PER_S
    links = [link for link in links if options.mbit in (None, link / MBIT)]
    results = _kept(options.json, kinds, links)
    for kind in kinds:
        for bandwidth in links:
            print(f"{kind}, {bandwidth / MBIT:.0f} Mbit/s ...", file=sys.stderr)
            steps = PERIOD if options.quick or bandwidth < 20 * MBIT else 4 * PERIOD
            results.append(
                measure(
                    Case(kind=kind, workers=WORKERS, bandwidth_bit_per_s=bandwidth, modes=MODES, measured_steps=steps)
                )
            )
    results.sort(key=lambda r: (r.case.kind, r.case.bandwidth_bit_per_s))
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        results=results,
    )
    write_figures(options.json, report)
    Console(width=200).print(table(results))
    return 0


def _kept(path: Path, kinds: list[Kind], links: list[float]) -> list[Result]:
    if not path.exists():
        return []
    before = msgspec.json.decode(path.read_bytes(), type=Report).results
    return [r for r in before if r.case.kind not in kinds or r.case.bandwidth_bit_per_s not in links]


if __name__ == "__main__":
    sys.exit(main())
