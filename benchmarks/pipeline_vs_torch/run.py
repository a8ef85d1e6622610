"""The same GPT, cut alike, under torch.distributed.pipelining (1F1B on Gloo) and under Isthmus, side by side.

`python benchmarks/pipeline_vs_torch/run.py [--quick] [--json PATH] [--timeout SECONDS]`. See README.md for results.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from host import wait_for_quiet
from rich.console import Console
from rich.table import Table
from sides import Start, paired_ratio, run_alone, run_by_turns, start_ours, start_peer, steps_within
from workload import LINKS, Figures, Workload

from isthmus_testing.lab import Lab, LabStatistics, lab_unavailable

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

SKIPPED_STEPS = 2
TURN_S_PER_MICRO_BATCH = 0.25
"""Many steps to a turn, and many turns to a run."""
SHORTEST_TURN_S = 4.0
LOSS_TOLERANCE = 1e-4
TARGET_RATIO = {"loopback": 1.0, "wan": 0.4}
TARGET_BOUND = 1.15
DEFAULT_JSON = Path(__file__).parent / "results" / "latest.json"
SIDES: tuple[tuple[str, Start], ...] = (("peer", start_peer), ("isthmus", start_ours))


class SideFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a case: all rounds together."""

    step_s: float
    """Median of the steady steps."""
    steps_s: list[float]
    payload_bytes: float
    """Tensor bytes of a step."""
    wire_bytes: float | None
    """Bytes of a step with every header, first step and connecting included, between the stages."""
    losses: list[float]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under both sides."""

    workload: Workload
    rounds: int
    """Runs of each side; on loopback, turns."""
    peer: SideFigures
    isthmus: SideFigures
    ratio: float
    """Ours over theirs: of the medians; on loopback, the median over neighbouring turns."""
    compute_s: list[float]
    """Per stage, the median over the steps of what one micro-batch's forward and backward took there."""
    wire_s: float
    """One micro-batch's tensor bytes on one link."""
    bound_s: float | None
    """Median over the steps of what each could not undercut (`bounds_of`)."""
    over_bound: float | None
    """Median over the steps of (step / its bound)."""
    others_cores: list[float]
    """Cores that other work used just before each run."""
    dropped_packets: int = 0

    @property
    def payload_equal(self) -> bool:
        return self.peer.payload_bytes == self.isthmus.payload_bytes == self.workload.step_bytes

    @property
    def loss_difference(self) -> float:
        pairs = zip(self.peer.losses, self.isthmus.losses, strict=True)
        return max(abs(theirs - mine) for theirs, mine in pairs)


def bounds_of(workload: Workload, figures: Figures, wire_s: float) -> list[float]:
    """Per steady step: max(slowest stage, wire) x micro-batches + one micro-batch through all stages and back.

    A stage's compute is what its forward and backward passes took in that very step: on a shared machine it varies.
    """
    hops_s = 2 * (workload.stages - 1) * (LINKS[workload.network].latency_s + wire_s)
    count = workload.micro_batches
    return [max(*busy, wire_s * count) + sum(busy) / count + hops_s for busy in figures.busy_s[SKIPPED_STEPS:]]


def steady(figures: Figures) -> list[float]:
    return [end_s - start_s for start_s, end_s in itertools.pairwise(figures.marks_s)][SKIPPED_STEPS:]


def on_loopback(workload: Workload, timeout_s: float) -> Case:
    """Both at once, by turns: the machine's other work slows the one as much as the other."""
    others_cores = wait_for_quiet(timeout_s)
    turn_s = max(SHORTEST_TURN_S, TURN_S_PER_MICRO_BATCH * workload.micro_batches)
    found, slices = run_by_turns([start for _, start in SIDES], workload, turn_s)
    turns = [steps_within(f, slices, side, SKIPPED_STEPS) for side, f in enumerate(found)]
    sides = [_side([step for turn in turns[side] for step in turn], f, None) for side, f in enumerate(found)]
    return Case(
        workload=workload,
        rounds=sum(s.side == 1 for s in slices),
        peer=sides[0],
        isthmus=sides[1],
        ratio=paired_ratio(*turns),
        compute_s=compute_of(workload, found[1:]),
        wire_s=0.0,
        bound_s=None,
        over_bound=None,
        others_cores=[others_cores],
    )


def on_wan(workload: Workload, rounds: int, timeout_s: float) -> Case:
    """Whole runs in turn, in namespaces that are joined by the workload's links."""
    runs: dict[str, list[Figures]] = {name: [] for name, _ in SIDES}
    wire_bytes: dict[str, list[float]] = {name: [] for name, _ in SIDES}
    others_cores: list[float] = []
    with Lab(workload.fleet) as lab:
        for _ in range(rounds):
            for name, start in SIDES:
                others_cores.append(wait_for_quiet(timeout_s))
                before = _carried(lab.statistics(), workload)
                runs[name].append(run_alone(start, workload, lab))
                wire_bytes[name].append((_carried(lab.statistics(), workload) - before) / workload.steps)
        dropped = sum(pair.drops for pair in lab.statistics().pairs.values())
        first, second, *_ = workload.fleet.names
        wire_s = workload.hop_bytes / lab.payload_bandwidth_bytes_per_s(first, second)
    peer, ours = (
        _side([s for f in runs[n] for s in steady(f)], runs[n][-1], statistics.median(wire_bytes[n])) for n in runs
    )
    bounds_s = [bound_s for figures in runs["isthmus"] for bound_s in bounds_of(workload, figures, wire_s)]
    return Case(
        workload=workload,
        rounds=rounds,
        peer=peer,
        isthmus=ours,
        ratio=ours.step_s / peer.step_s,
        compute_s=compute_of(workload, runs["isthmus"]),
        wire_s=wire_s,
        bound_s=statistics.median(bounds_s),
        over_bound=statistics.median(s / b for s, b in zip(ours.steps_s, bounds_s, strict=True)),
        others_cores=others_cores,
        dropped_packets=dropped,
    )


def compute_of(workload: Workload, runs: Sequence[Figures]) -> list[float]:
    steps = [busy for figures in runs for busy in figures.busy_s[SKIPPED_STEPS:]]
    return [statistics.median(stage) / workload.micro_batches for stage in zip(*steps, strict=True)]


def _side(steps_s: list[float], last: Figures, wire_bytes: float | None) -> SideFigures:
    return SideFigures(
        step_s=statistics.median(steps_s),
        steps_s=steps_s,
        payload_bytes=last.step_payload_bytes,
        wire_bytes=wire_bytes,
        losses=last.losses,
    )


def _carried(count: LabStatistics, workload: Workload) -> int:
    """Wire bytes so far between the stages; what goes to and from the coordinator is left out."""
    names = set(workload.fleet.names)
    return sum(pair.wire_bytes for ends, pair in count.pairs.items() if names.issuperset(ends))


def cases(quick: bool) -> list[tuple[Workload, int]]:
    """Workloads, and the rounds of those that run whole. Enough steps for several steady ones in each run."""

    def case(network: Literal["loopback", "wan"], stages: int, micro_batches: int, steps: int) -> tuple[Workload, int]:
        workload = Workload(network=network, stages=stages, micro_batches=micro_batches, steps=steps)
        return workload, 1 if quick else 3

    if quick:
        return [case("loopback", 2, 8, 24), case("wan", 2, 8, 6)]
    return [
        case("loopback", 2, 8, 80),
        case("loopback", 4, 8, 80),
        case("loopback", 2, 32, 40),
        case("loopback", 4, 32, 40),
        case("wan", 2, 8, 8),
        case("wan", 4, 8, 8),
        case("wan", 2, 32, 6),
        case("wan", 4, 32, 6),
    ]


def measure(workload: Workload, rounds: int, timeout_s: float) -> Case:
    if workload.network == "loopback":
        return on_loopback(workload, timeout_s)
    return on_wan(workload, rounds, timeout_s)


def table_of(found: Sequence[Case]) -> Table:
    table = Table(title="Steady step, torch.distributed.pipelining against Isthmus", title_justify="left")
    for heading in (
        "links",
        "stages",
        "micro-batches",
        "peer",
        "isthmus",
        "ratio",
        "bound",
        "isthmus / bound",
        "payload a step",
        "wire, peer",
        "wire, isthmus",
        "loss apart",
    ):
        table.add_column(heading, justify="left" if heading == "links" else "right")
    for case in found:
        w = case.workload
        over = _judged(case.over_bound, TARGET_BOUND) if case.over_bound else "-"
        wires = [f"{s.wire_bytes / 1e6:.2f} MB" if s.wire_bytes else "-" for s in (case.peer, case.isthmus)]
        payload = f"{case.isthmus.payload_bytes / 1e6:.2f} MB {'=' if case.payload_equal else 'DIFFER'}"
        table.add_row(
            w.network,
            str(w.stages),
            str(w.micro_batches),
            f"{1e3 * case.peer.step_s:.0f} ms",
            f"{1e3 * case.isthmus.step_s:.0f} ms",
            _judged(case.ratio, TARGET_RATIO[w.network]),
            f"{1e3 * case.bound_s:.0f} ms" if case.bound_s else "-",
            over,
            payload,
            *wires,
            _judged(case.loss_difference, LOSS_TOLERANCE, "{:.0e}"),
        )
    return table


def _judged(value: float, target: float, form: str = "{:.3f}") -> str:
    return f"[{'green' if value <= target else 'red'}]{form.format(value)}[/]"


def main() -> int:
    parser = options_of(__doc__, DEFAULT_JSON, "two cases, one round: does it work?")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="wait for a quiet host so long")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no side stays behind
    console = Console(width=None if sys.stdout.isatty() else 160)
    wanted = cases(options.quick)
    if (reason := lab_unavailable()) is not None:
        console.print(f"without the wan cases: {reason}", markup=False)
        wanted = [(workload, rounds) for workload, rounds in wanted if workload.network != "wan"]
    found: list[Case] = []
    for workload, rounds in wanted:
        console.print(f"{workload.network}, {workload.stages} stages, {workload.micro_batches} micro-batches ...")
        found.append(measure(workload, rounds, options.timeout))
        write_figures(options.json, found)
    console.print(table_of(found))
    console.print(f"figures: {options.json}", markup=False)
    agree = all(case.payload_equal and case.loss_difference <= LOSS_TOLERANCE for case in found)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
