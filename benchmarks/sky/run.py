"""Sky Computing's experiments: BERT with 40, 80 and 160 encoders on 16, 32 and 64 nodes, one of which is the server.

`python benchmarks/sky/run.py [--quick] [--json PATH]`

Every allocation is judged by one workload: seconds per step of the slowest device, compute plus one latency. The paper
gives percentages of training time saved against even allocation; ours are of the largest workload. In full it takes
hours: the paper's programme, `optimal`, ends at a limit of work, which 40 encoders on 16 nodes do not reach in ten
minutes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from bert import bert_layers
from rich.console import Console
from rich.table import Table

from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation import (
    Allocation,
    LayerProblem,
    equal_compute_layers,
    even_layers,
    sky_heuristic_layers,
    sky_optimal_layers,
)
from isthmus_testing.allocation import certified_layers

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import in_time, machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
NODES, ENCODERS, SEEDS = (16, 32, 64), (40, 80, 160), (0, 1, 2)
DEVICE_FLOPS_PER_S = 5e12
"""A P100's sustained speed before it is slowed down; it scales every row alike."""
LATENCY_S = 1e-3
MEMORY_SHARE = (2.0, 4.0)
"""Range of a device's memory, in equal shares of the model's."""
SLOW_DOWN_MEAN, SLOW_DOWN_DEVIATION, SLOW_DOWN_RANGE = 4.0, 1.5, (1.0, 7.0)
COUNTED_DEVICES = 10_000
COUNTED_LAYERS = 100_000
COUNTED_RUNS = 20

PAPER = {
    "strong": {"optimal": (35.0, 19.4, None), "heuristic": (22.2, 10.5, 15.4)},
    "weak": {"optimal": (25.0, 19.4, None), "heuristic": (21.7, 10.5, 55.6)},
}
SCALING = {"strong": ((16, 80), (32, 80), (64, 80)), "weak": ((16, 40), (32, 80), (64, 160))}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int
    encoders: int
    layers: int
    seed: int
    planner: str
    seconds: float
    workload_s: float | None = None
    """None where the planner found no allocation that fits."""
    lower_bound_s: float = 0.0
    gap: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    counted_ms: float
    """Median of the exact allocation of identical layers."""
    results: tuple[Result, ...]

    @property
    def good(self) -> bool:
        largest = [r.gap for r in self.results if (r.nodes, r.encoders, r.planner) == (64, 160, "certified")]
        near = all(g is not None and g <= 1e-3 for g in largest)
        return near and in_time(self.counted_ms, 50) and not beaten(self.results)


def problem_of(nodes: int, encoders: int, seed: int) -> LayerProblem:
    """A device slowed by s takes 1 + s times as long, as the paper's sleep does."""
    rng = np.random.default_rng(seed)
    flops, size_bytes = bert_layers(encoders)
    devices = nodes - 1
    slow_down = np.clip(rng.normal(SLOW_DOWN_MEAN, SLOW_DOWN_DEVIATION, devices), *SLOW_DOWN_RANGE)
    memory = rng.uniform(*MEMORY_SHARE, devices) * size_bytes.sum() / devices
    return LayerProblem(
        layer_flops=flops,
        layer_memory_bytes=size_bytes,
        device_s_per_flop=(1 + slow_down) / DEVICE_FLOPS_PER_S,
        device_memory_bytes=np.maximum(memory, 2 * size_bytes.max()),
        device_latency_s=np.full(devices, LATENCY_S),
    )


PLANNERS: dict[str, Callable[[LayerProblem], Allocation]] = {
    "even": even_layers,
    "equal-compute": equal_compute_layers,
    "heuristic": sky_heuristic_layers,
    "optimal": lambda p: sky_optimal_layers(p),
    "certified": lambda p: certified_layers(p),
}


def measure(nodes: int, encoders: int, seed: int, planner: str) -> Result:
    problem = problem_of(nodes, encoders, seed)
    start = time.perf_counter()
    try:
        found = PLANNERS[planner](problem)
    except FleetTooSmall:
        found = None
    seconds = time.perf_counter() - start
    known = Result(nodes=nodes, encoders=encoders, layers=problem.layers, seed=seed, planner=planner, seconds=seconds)
    if found is None:
        return known
    return msgspec.structs.replace(
        known,
        workload_s=found.workload_s,
        lower_bound_s=found.lower_bound_s,
        gap=found.gap if found.lower_bound_s else None,
    )


def counted_ms() -> float:
    rng = np.random.default_rng(0)
    problem = LayerProblem(
        layer_flops=np.full(COUNTED_LAYERS, 1e9),
        layer_memory_bytes=np.full(COUNTED_LAYERS, 1e6),
        device_s_per_flop=rng.uniform(1, 7, COUNTED_DEVICES) / 1e12,
        device_memory_bytes=rng.uniform(5e6, 1e8, COUNTED_DEVICES),
        device_latency_s=rng.uniform(0, 1e-3, COUNTED_DEVICES),
    )
    taken: list[float] = []
    for _ in range(COUNTED_RUNS):
        start = time.perf_counter()
        certified_layers(problem)
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def beaten(results: Iterable[Result]) -> list[Result]:
    """Whatever is better than `certified` on the same case."""
    rows = list(results)
    ours = {(r.nodes, r.encoders, r.seed): r.workload_s for r in rows if r.planner == "certified"}
    return [
        r
        for r in rows
        if r.workload_s is not None
        and ((best := ours[r.nodes, r.encoders, r.seed]) is None or r.workload_s < best * (1 - 1e-9))
    ]


def cases_table(results: Iterable[Result]) -> Table:
    drawn = Table("nodes", "encoders", "layers", "planner", title="Median of the seeds; gap: the largest")
    for heading in ("planning", "largest workload", "against even", "proven gap"):
        drawn.add_column(heading, justify="right")
    grouped: dict[tuple[int, int, int, str], list[Result]] = {}
    for r in results:
        grouped.setdefault((r.nodes, r.encoders, r.layers, r.planner), []).append(r)
    for (nodes, encoders, layers, planner), rows in grouped.items():
        fitting = [r.workload_s for r in rows if r.workload_s is not None]
        gaps = [r.gap for r in rows if r.gap is not None]
        saved = saving(grouped[nodes, encoders, layers, "even"], rows)
        unfit = f"{len(fitting)} of {len(rows)} fit"
        drawn.add_row(
            str(nodes),
            str(encoders),
            str(layers),
            planner,
            f"{statistics.median(r.seconds for r in rows):.3g} s",
            unfit if len(fitting) < len(rows) else f"{statistics.median(fitting):.4f} s",
            f"{-saved:+.1%}" if saved else "-",
            f"{max(gaps):.2%}" if gaps else "-",
            end_section=planner == "certified",
        )
    return drawn


def saving(even: Iterable[Result], rows: Iterable[Result]) -> float | None:
    """Mean share of even's workload that is saved, over seeds on which both fit."""
    pairs = [(e.workload_s, r.workload_s) for e, r in zip(even, rows, strict=True)]
    shares = [1 - r / e for e, r in pairs if e is not None and r is not None]
    return statistics.mean(shares) if shares else None


def scaling_table(kind: str, results: Iterable[Result]) -> Table:
    rows = list(results)
    drawn = Table("planner", title=f"{kind} scaling: saved against even, ours (paper)")

    def of(nodes: int, encoders: int, planner: str) -> list[Result]:
        return [r for r in rows if (r.nodes, r.encoders, r.planner) == (nodes, encoders, planner)]

    for nodes, encoders in SCALING[kind]:
        drawn.add_column(f"{nodes} nodes, {encoders} encoders", justify="right")
    for planner in ("heuristic", "optimal", "certified"):
        cells: list[str] = []
        for place, (nodes, encoders) in enumerate(SCALING[kind]):
            saved = saving(of(nodes, encoders, "even"), of(nodes, encoders, planner))
            theirs = PAPER[kind].get(planner, (None,) * 3)[place]
            cells.append(("-" if saved is None else f"{saved:.1%}") + (f" ({theirs} %)" if theirs else ""))
        drawn.add_row(planner, *cells)
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "8 nodes, one seed, 8 and 12 encoders")
    options = parser.parse_args()
    grid = ((8,), (8, 12), SEEDS[:1]) if options.quick else (NODES, ENCODERS, SEEDS)
    results: list[Result] = []
    for nodes in grid[0]:
        for encoders in grid[1]:
            print(f"{nodes} nodes, {encoders} encoders ...", file=sys.stderr)
            results += [measure(nodes, encoders, seed, planner) for planner in PLANNERS for seed in grid[2]]
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        counted_ms=counted_ms(),
        results=tuple(results),
    )
    write_figures(options.json, found)
    console = Console(width=120)
    console.print(cases_table(results))
    for kind in SCALING:
        console.print(scaling_table(kind, results))
    console.print(
        f"identical layers: {COUNTED_LAYERS} on {COUNTED_DEVICES} devices, exact in {found.counted_ms:.1f} ms; "
        f"better than certified: {len(beaten(results))} of {len(results)}"
    )
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
