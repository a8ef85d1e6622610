"""Step times of the public yardstick for pipelines over a wide-area network, from the simulator.

The yardstick (Protocol NanoGPT, Pluralis, 2026): a decoder of at most 204 M parameters and width 1,024 in 8 stages, one
per machine, 524,288 tokens per step, 200 Mbit/s and 50 ms between any two. Published: 100.5 s per step for dense 1F1B,
19.9 s for subspace boundaries of 160 numbers per token.

The same machines that decide in a run decide here, on a virtual clock, under the two networks of `networks.py`.
Each variant has the number of micro-batches that suits it best.

    python benchmarks/wan_loss/yardstick.py [--micro-batches 16 32 64 128] [--tflops 400] [--json PATH]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from networks import Network, Order, Step, bound_s, step_of

from isthmus.fleet import Link
from isthmus.plans import Edge, Plan, Prediction, Replica, Schedule, Stage, StageMemory

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

STAGES, PARAMETERS, WIDTH, TOKENS = 8, 204_000_000, 1024, 524_288
LINK = Link(0.050, 200e6 / 8)
SUBSPACE = 160
COUNTS = (16, 32, 64, 128)
FIGURES = Path(__file__).parent / "results" / "yardstick.json"


class Variant(msgspec.Struct, frozen=True):
    """How a pipeline is run, and what it sends."""

    name: str
    bytes_per_token: float
    """In each direction; a token's values are 1,024."""
    order: Order
    published_s: float | None = None


DENSE, INT8, FOUR_BITS, LOW_RANK = 2.0 * WIDTH, 1.0 * WIDTH, 0.5 * WIDTH, 2.0 * SUBSPACE
"""bf16; codes of 8 and 4 bits, whose scales are below 1 % and left out; bf16 of the subspace."""
VARIANTS = (
    Variant("1F1B, dense", DENSE, "1f1b", 100.5),
    Variant("1F1B, subspace 160", LOW_RANK, "1f1b", 19.9),
    Variant("deep 1F1B, dense", DENSE, "deep"),
    Variant("delayed, dense", DENSE, "delayed"),
    Variant("deep 1F1B, int8", INT8, "deep"),
    Variant("delayed, int8", INT8, "delayed"),
    Variant("deep 1F1B, 4 bits", FOUR_BITS, "deep"),
    Variant("delayed, 4 bits", FOUR_BITS, "delayed"),
    Variant("delayed, subspace 160", LOW_RANK, "delayed"),
)


class Row(msgspec.Struct, frozen=True):
    name: str
    meter: Step
    tcp: Step
    bound_s: float
    """max(compute, wire) x micro-batches over TCP."""
    published_s: float | None


def plan_of(variant: Variant, micro_batches: int) -> Plan:
    """Equal stages in a chain."""
    size = math.ceil(variant.bytes_per_token * TOKENS / micro_batches)
    forward = 2 * PARAMETERS * TOKENS // STAGES // micro_batches
    edges = tuple(
        Edge(source=s, target=s + 1, values=("x",), gradients=("x",), forward_bytes=size, backward_bytes=size)
        for s in range(STAGES - 1)
    )
    no_memory = StageMemory(weights=0, gradients=0, optimizer=0, activations=0)
    stages = tuple(
        Stage(
            device=f"m{s}",
            first=s,
            last=s,
            first_op="",
            last_op="",
            flops_forward=forward,
            flops_backward=2 * forward,
            parameter_bytes=0,
            memory=no_memory,
        )
        for s in range(STAGES)
    )
    schedule = Schedule("1f1b", (1,) * STAGES)
    return Plan(
        model="yardstick",
        fleet="yardstick",
        planner="hand",
        micro_batch_size=1,
        micro_batches=micro_batches,
        replicas=(Replica(stages=stages, edges=edges, micro_batches=micro_batches, schedule=schedule),),
        predicted=Prediction(step_s=0, period_s=0, fill_s=0, micro_batches=1, eq3_step_s=0, bottleneck=""),
    )


def row_of(variant: Variant, counts: Sequence[int], flops_per_s: float) -> Row:
    """Over TCP gradients are clipped, so that every update waits for all norms."""

    def best(network: Network) -> Step:
        steps = [
            step_of(plan_of(variant, n), LINK, flops_per_s, network, variant.order, clips=network == "tcp")
            for n in counts
        ]
        return min(steps, key=lambda step: step.seconds)

    least_s = bound_s(plan_of(variant, 1), LINK, flops_per_s)
    return Row(variant.name, best("meter"), best("tcp"), least_s, variant.published_s)


def main() -> None:
    parser = options_of(__doc__, FIGURES)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=COUNTS, help="numbers per step to choose from")
    parser.add_argument("--tflops", type=float, default=400.0, help="sustained by each machine, in TFLOP/s")
    given = parser.parse_args()
    rows = [row_of(variant, given.micro_batches, given.tflops * 1e12) for variant in VARIANTS]
    compute_s = 6 * PARAMETERS * TOKENS / STAGES / given.tflops / 1e12
    dense_s = DENSE * TOKENS / LINK.bandwidth_bytes_per_s
    print(f"per stage and step: compute {compute_s:.2f} s, dense wire {dense_s:.1f} s each way")
    print("seconds per step (micro-batches)")
    print(f"{'':24}{'meter':>13}{'published':>11}{'tcp':>13}{'bound':>8}{'tcp/bound':>11}{'in flight':>11}")
    for r in rows:
        published = f"{r.published_s:.1f}" if r.published_s else ""
        meter, tcp = (f"{step.seconds:.1f} ({step.micro_batches})" for step in (r.meter, r.tcp))
        print(
            f"{r.name:24}{meter:>13}{published:>11}{tcp:>13}{r.bound_s:8.1f}"
            f"{r.tcp.seconds / r.bound_s:11.3f}{r.tcp.in_flight:11}"
        )
    write_figures(given.json, {"tflops": given.tflops, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
