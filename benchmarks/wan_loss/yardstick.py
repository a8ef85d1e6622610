"""Step times of the public yardstick for pipelines over a wide-area network, from the simulator.

The yardstick (Protocol NanoGPT, Pluralis, 2026): a decoder of at most 204 M parameters and width 1,024 in 8 stages, one
per machine, 524,288 tokens per step, 200 Mbit/s and 50 ms between any two. Published: 100.5 s per step for dense 1F1B,
19.9 s for subspace boundaries of 160 numbers per token.

The same machines that decide in a run decide here, on a virtual clock, under two networks:

    meter   the yardstick's own: a machine has one wire for both neighbours, and a message occupies it for 50 ms more
            than its bytes take. (Here the wire is that of what leaves: along a chain as much leaves as arrives.)
    tcp     as TCP between two machines is: each direction and each neighbour for itself, latency on the way

Each variant has the number of micro-batches that suits it best.

    python benchmarks/wan_loss/yardstick.py [--micro-batches 16 32 64 128] [--tflops 400] [--json PATH]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures
from isthmus.fleet import Device, Fleet, Link, Links, Region
from isthmus.plans import Edge, Plan, Prediction, Replica, Schedule, Stage, StageMemory, classic_in_flight
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import steady_step_s

STAGES, PARAMETERS, WIDTH, TOKENS = 8, 204_000_000, 1024, 524_288
BYTES_PER_S, LATENCY_S = 200e6 / 8, 0.050
SUBSPACE = 160
STEPS = 10
COUNTS = (16, 32, 64, 128)
FIGURES = Path(__file__).parent / "results" / "yardstick.json"
Meter = Literal["meter", "tcp"]


class Variant(msgspec.Struct, frozen=True):
    """How a pipeline is run, and what it sends."""

    name: str
    bytes_per_token: float
    """In each direction; a token's values are 1,024."""
    schedule: Literal["1f1b", "deep", "delayed"]
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


class Step(msgspec.Struct, frozen=True):
    seconds: float
    micro_batches: int
    in_flight: int
    """On the first stage."""


class Row(msgspec.Struct, frozen=True):
    name: str
    meter: Step
    tcp: Step
    bound_s: float
    """max(compute, wire) x micro-batches over TCP."""
    published_s: float | None


def fleet_of(network: Meter, flops_per_s: float) -> Fleet:
    names = [f"m{stage}" for stage in range(STAGES)]
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=flops_per_s, memory_bytes=1 << 37) for n in names)
    if network == "tcp":
        return Fleet(name="tcp", devices=devices, links=Links(default=Link(LATENCY_S, BYTES_PER_S)))
    wires = tuple(Region(region=f"at-{n}", uplink_bytes_per_s=BYTES_PER_S) for n in names)
    return Fleet(name="meter", devices=devices, links=Links(default=Link(0.0, BYTES_PER_S)), region_info=wires)


def plan_of(variant: Variant, network: Meter, micro_batches: int, flops_per_s: float) -> Plan:
    """Equal stages in a chain. Under the meter a message is longer by the bytes of 50 ms."""
    size = math.ceil(variant.bytes_per_token * TOKENS / micro_batches)
    sent = size if network == "tcp" else size + round(LATENCY_S * BYTES_PER_S)
    forward = 2 * PARAMETERS * TOKENS // STAGES // micro_batches
    edges = tuple(
        Edge(source=s, target=s + 1, values=("x",), gradients=("x",), forward_bytes=sent, backward_bytes=sent)
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
    name = "delayed" if variant.schedule == "delayed" else "1f1b"
    in_flight = classic_in_flight("1f1b", STAGES, micro_batches)
    if variant.schedule != "1f1b":
        in_flight = _deep(in_flight, variant, network, micro_batches, flops_per_s)
    return Plan(
        model="yardstick",
        fleet=network,
        planner="hand",
        micro_batch_size=1,
        micro_batches=micro_batches,
        replicas=(
            Replica(stages=stages, edges=edges, micro_batches=micro_batches, schedule=Schedule(name, in_flight)),
        ),
        predicted=Prediction(step_s=0, period_s=0, fill_s=0, micro_batches=1, eq3_step_s=0, bottleneck=""),
    )


def _deep(
    classic: tuple[int, ...], variant: Variant, network: Meter, micro_batches: int, flops_per_s: float
) -> tuple[int, ...]:
    """As many in flight as hide a round trip."""
    wire_s, compute_s = _message_s(variant, micro_batches), _compute_s(micro_batches, flops_per_s)
    hop_s = wire_s + LATENCY_S
    period_s = max(compute_s, wire_s if network == "tcp" else 2 * hop_s)
    steps = 2 if variant.schedule == "delayed" else 1
    trips_s = [(STAGES - s) * compute_s + 2 * (STAGES - 1 - s) * hop_s for s in range(STAGES)]
    wanted = [max(c, math.ceil(t / period_s) + steps) for c, t in zip(classic, trips_s, strict=True)]
    deep = [min(k, steps * micro_batches) for k in wanted]
    return (*deep[:-1], 1)


def _message_s(variant: Variant, micro_batches: int) -> float:
    return variant.bytes_per_token * TOKENS / micro_batches / BYTES_PER_S


def _compute_s(micro_batches: int, flops_per_s: float) -> float:
    return 6 * PARAMETERS * TOKENS / STAGES / micro_batches / flops_per_s


def step_of(variant: Variant, network: Meter, micro_batches: int, flops_per_s: float) -> Step:
    """Simulated; over TCP gradients are clipped, so that every update waits for all norms."""
    plan = plan_of(variant, network, micro_batches, flops_per_s)
    spec = RunSpec(steps=STEPS, micro_batches=micro_batches, micro_batch_size=1)
    trace = simulate(plan, fleet_of(network, flops_per_s), spec, SimulationOptions(clips=network == "tcp"))
    return Step(steady_step_s(trace), micro_batches, plan.replica.schedule.in_flight[0])


def row_of(variant: Variant, counts: Sequence[int], flops_per_s: float) -> Row:
    def best(network: Meter) -> Step:
        return min((step_of(variant, network, n, flops_per_s) for n in counts), key=lambda step: step.seconds)

    bound_s = max(_message_s(variant, 1), _compute_s(1, flops_per_s))
    return Row(variant.name, best("meter"), best("tcp"), bound_s, variant.published_s)


def main() -> None:
    parser = options_of(__doc__, FIGURES)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=COUNTS, help="numbers per step to choose from")
    parser.add_argument("--tflops", type=float, default=400.0, help="sustained by each machine, in TFLOP/s")
    given = parser.parse_args()
    rows = [row_of(variant, given.micro_batches, given.tflops * 1e12) for variant in VARIANTS]
    compute_s, dense_s = _compute_s(1, given.tflops * 1e12), DENSE * TOKENS / BYTES_PER_S
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
