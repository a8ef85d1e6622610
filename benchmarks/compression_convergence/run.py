"""What compression between stages does to the loss and to the time of a step.

`python benchmarks/compression_convergence/run.py [--quick] [--missing] [--json PATH]`

A ResNet on digits and a GPT on Python's standard library, four stages, the link in the middle 200 times slower than
the others. The same cut is trained under every method and three seeds with the real codecs, in one process; the time
of a step is the simulator's. Held-out losses are of the model as it is, and with values packed as in training.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from pipeline import Stages
from rich.console import Console
from rich.table import Table

from isthmus.cost import build_plan, plan_compression, with_edges
from isthmus.data import SampleOrder, load_dataset
from isthmus.experiments import run_spec
from isthmus.graph import cuts
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s
from models import CASES, Case

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
RATIO = 100.0
SEEDS = (0, 1, 2)
CURVE_POINTS = 5


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    method: str
    seed: int
    curve: tuple[float, ...]
    """Held-out loss after equal parts of the steps; the last is the final one. NaN where the run diverged."""
    packed_loss: float
    """The final one where values are packed as in training."""
    trained_s: float


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one model."""

    model: str
    method: str
    step_s: float
    """Simulated."""
    messages: tuple[str, ...]
    """Codec and ratio of each message, edge after edge, forward then backward."""
    slow_bytes: int
    """Across the slow link per micro-batch, both ways."""
    loss: float
    spread: float
    """Standard deviation over the seeds."""
    gap: float
    """Of the loss to that of the dense method, relative."""
    packed_loss: float
    """Of the same model where values are packed as in training."""
    packed_gap: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    seeds: int
    steps: dict[str, int]
    methods: tuple[Method, ...]
    runs: tuple[Trained, ...]


def plan_of(case: Case, prepared: Prepared) -> Plan:
    """Equal shares of the FLOPs, at cuts that one tensor crosses."""
    fleet = case.fleet()
    problem = prepared.problem(fleet)
    legal = [cut.position for cut in cuts(prepared.flow) if len(cut.values) == 1]
    total, stages = problem.cumulative_flops[-1], len(fleet.names)
    places = [min(legal, key=lambda p: abs(problem.cumulative_flops[p] - total * k / stages)) for k in range(1, stages)]
    return build_plan(problem, fleet.names, places, planner="equal FLOPs")


def planned(case: Case, prepared: Prepared, method: str, ratio: float = RATIO) -> Plan:
    dense = plan_of(case, prepared)
    if method == "dense":
        return dense
    name, *choices = method.split(", ")
    problem = prepared.problem(case.fleet())
    packed = plan_compression(name, problem, dense, ratio, feedback="feedback" in choices)
    if "gradients" in choices:
        edges = [msgspec.structs.replace(e, forward_compression=None) for e in packed.replica.edges]
        packed = with_edges(problem, packed, [edges])
    return packed


def train(case: Case, prepared: Prepared, plan: Plan, method: str, seed: int) -> Trained:
    job, started = prepared.job, time.perf_counter()
    stages, t, size = Stages(prepared, plan), job.training, prepared.job.micro_batch_size
    count = min(t.eval_samples, prepared.samples.heldout) // size
    data, others = load_dataset(job.data, "train"), load_dataset(job.data, "heldout")
    columns = list(prepared.samples.columns)
    held_out = [others.batch(range(k * size, (k + 1) * size), columns) for k in range(count)]
    order, curve = SampleOrder(len(data), seed, True), list[float]()
    for step in range(t.steps):
        starts = [step * t.batch_size + m * size for m in range(job.micro_batches)]
        samples = [order.indices(start, size) for start in starts]
        loss = stages.step(step, [data.batch(its, columns) for its in samples], [its.tolist() for its in samples])
        if not math.isfinite(loss):
            curve += [math.nan] * (CURVE_POINTS - len(curve))
            break
        if (step + 1) * CURVE_POINTS // t.steps > len(curve):
            curve.append(stages.evaluate(held_out, packed=False))
    packed_loss = stages.evaluate(held_out, packed=True) if math.isfinite(curve[-1]) else math.nan
    return Trained(
        model=case.name,
        method=method,
        seed=seed,
        curve=tuple(curve),
        packed_loss=packed_loss,
        trained_s=time.perf_counter() - started,
    )


def summed_up(case: Case, prepared: Prepared, runs: list[Trained]) -> list[Method]:
    found: list[Method] = []
    for method in case.methods:
        chosen = [r for r in runs if (r.model, r.method) == (case.name, method)]
        finals, packed_loss = [r.curve[-1] for r in chosen], statistics.fmean(r.packed_loss for r in chosen)
        plan = planned(case, prepared, method)
        middle = next(e for e in plan.replica.edges if (e.source, e.target) == (1, 2))
        loss = statistics.fmean(finals)
        base = found[0].loss if found else loss
        found.append(
            Method(
                model=case.name,
                method=method,
                loss=loss,
                spread=statistics.pstdev(finals),
                gap=loss / base - 1,
                packed_loss=packed_loss,
                packed_gap=packed_loss / base - 1,
                step_s=steady_step_s(simulate(plan, case.fleet(), run_spec(prepared))),
                messages=tuple(
                    "dense" if c is None else f"{c.codec} {c.ratio:.3g}" if c.ratio > 1 else c.codec
                    for e in plan.replica.edges
                    for c in (e.forward_compression, e.backward_compression)
                ),
                slow_bytes=middle.forward_wire_bytes + middle.backward_wire_bytes,
            )
        )
    return found


def table(found: Report) -> Table:
    drawn = Table("model", "method", title=f"Training under compression, ratio {RATIO:g}, {found.seeds} seeds")
    for heading in ("messages", "slow link, bytes", "step", "held-out loss", "gap", "with codecs", "gap"):
        drawn.add_column(heading, justify="right")
    last = {m.model: m for m in found.methods}
    for m in found.methods:
        drawn.add_row(
            m.model,
            m.method,
            ", ".join(dict.fromkeys(m.messages)),
            f"{m.slow_bytes:,}",
            f"{m.step_s * 1e3:.0f} ms",
            f"{m.loss:.4f} +- {m.spread:.4f}",
            f"{m.gap:+.1%}",
            f"{m.packed_loss:.4f}",
            f"{m.packed_gap:+.1%}",
            end_section=m is last[m.model],
        )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "one seed, a tenth of the steps")
    parser.add_argument("--missing", action="store_true", help="train only what has no figures yet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[str, str, int], Trained] = {}
    if options.missing and options.json.exists():
        before = msgspec.json.decode(options.json.read_bytes(), type=Report)
        known = {(r.model, r.method, r.seed): r for r in before.runs}
    seeds, runs, methods, steps = SEEDS[:1] if options.quick else SEEDS, list[Trained](), list[Method](), {}
    for case in CASES:
        steps[case.name] = case.steps // 10 if options.quick else case.steps
        for seed in seeds:
            prepared = prepare(case.job(seed, steps[case.name]))
            for method in case.methods:
                run = known.get((case.name, method, seed))
                run = run or train(case, prepared, planned(case, prepared, method), method, seed)
                print(f"{case.name}, {method}, seed {seed}: {run.curve[-1]:.4f} {run.packed_loss:.4f}", file=sys.stderr)
                runs.append(run)
        methods += summed_up(case, prepare(case.job(seeds[0], steps[case.name])), runs)
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        seeds=len(seeds),
        steps=steps,
        methods=tuple(methods),
        runs=tuple(runs),
    )
    write_figures(options.json, found)
    Console(width=150).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
