"""Step times of the twin over processes and emulated links, beside the simulator's.

    python benchmarks/wan_loss/measured_steps.py [--only NAME ...] [--json PATH]

Eight devices. Links and devices are slowed alike by the factor of each case, so that two cores compute all eight stages
in time; figures are divided by it. A message has a header of some 300 bytes, which the simulator leaves out and an
emulated link carries. It weighs where a micro-batch takes few bytes: fewer micro-batches than simulated may be best.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from networks import Order, fleet_of, scheduled, step_of
from step_times import plan_of, prepared_of
from throughput import measured_s
from twin import FLOPS_PER_S, LINK, VARIANTS

from isthmus.experiments import OptimizerConfig
from isthmus.fleet import Link
from isthmus.job import RuntimeConfig, prepared_again

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

FIGURES = Path(__file__).parent / "results" / "measured_steps.json"
STEPS = 6


class Case(NamedTuple):
    variant: str
    order: Order
    micro_batches: int
    slower: float


CASES = (
    Case("dense", "1f1b", 32, 2),
    Case("dense", "deep", 32, 2),
    Case("subspace 6.4x", "1f1b", 32, 6),
    Case("subspace 16x", "deep", 32, 16),
    Case("delayed subspace 6.4x int4 muon", "delayed", 8, 32),
    Case("delayed subspace 6.4x int4 muon", "delayed", 16, 32),
    Case("delayed subspace 6.4x int4 muon", "delayed", 32, 32),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step over TCP, as if nothing were slowed."""

    variant: str
    order: Order
    micro_batches: int
    slower: float
    simulated_s: float
    measured_s: float


def row_of(case: Case) -> Row:
    variant = next(v for v in VARIANTS if v.name == case.variant)
    link = Link(LINK.latency_s * case.slower, LINK.bandwidth_bytes_per_s / case.slower)
    speed = FLOPS_PER_S / case.slower
    plan = scheduled(plan_of(variant, case.micro_batches), link, speed, "tcp", case.order)
    simulated_s = step_of(plan_of(variant, case.micro_batches), link, speed, "tcp", case.order).seconds
    made = prepared_of(variant.method, variant.rate, case.micro_batches)
    job = msgspec.structs.replace(
        made.job,
        schedule="delayed" if variant.delayed else "1f1b",
        training=msgspec.structs.replace(made.job.training, steps=STEPS),
        optimizer=(OptimizerConfig(),),
        runtime=RuntimeConfig(threads=1, emulate=True, adapt=False, snapshots=False),
    )
    seconds = measured_s(prepared_again(made, job), plan, fleet_of(plan, link, speed, "tcp"))
    return Row(
        variant=case.variant,
        order=case.order,
        micro_batches=case.micro_batches,
        slower=case.slower,
        simulated_s=simulated_s / case.slower,
        measured_s=seconds / case.slower,
    )


def main() -> None:
    parser = options_of(__doc__, FIGURES)
    variants = sorted({case.variant for case in CASES})
    parser.add_argument("--only", nargs="+", choices=variants, metavar="NAME", help="of these variants")
    given = parser.parse_args()
    rows: list[Row] = []
    print(f"{'':34}{'order':>9}{'n':>4}{'slower':>8}{'simulated':>11}{'measured':>10}{'/ simulated':>13}")
    for case in CASES:
        if not given.only or case.variant in given.only:
            rows.append(row := row_of(case))
            print(
                f"{row.variant:34}{row.order:>9}{row.micro_batches:4}{row.slower:8g}{row.simulated_s:11.3f}"
                f"{row.measured_s:10.3f}{row.measured_s / row.simulated_s:13.3f}",
                flush=True,
            )
            write_figures(given.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
