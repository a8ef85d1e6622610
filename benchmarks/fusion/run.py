"""FusionLLM's experiment: what scheduler and compression do to the time of an iteration over slow links.

`python benchmarks/fusion/run.py [--quick] [--json PATH]`

ResNet-18, ResNet-101 and GPT2-XL on both of the paper's testbeds, simulated: four schedulers, each dense and under
three ratio planners at ratios 100 and 1000. Ends with 1 if a compressed plan takes longer than the same plan dense, or
if op-fence with AdaTopK is not faster than the dense equal-number plan.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cases import CASES, equal_compute
from rich.console import Console
from rich.table import Table

from isthmus.cost import Problem, plan_compression
from isthmus.errors import FleetTooSmall
from isthmus.experiments import RunSpec
from isthmus.fleet import built_in_fleet
from isthmus.planners.baselines.even import even
from isthmus.planners.baselines.op_fence import op_fence
from isthmus.planners.search.one_pipeline import chain
from isthmus.plans import Compression, Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
PAPER = "1.45-9.39"
SCHEDULERS: Mapping[str, Callable[[Problem], Plan]] = {
    "equal-number": even,
    "equal-compute": equal_compute,
    "op-fence": op_fence,
    "auto": chain,
}
"""`auto` with one replica is `chain`: FusionLLM has no data parallelism."""
RATIO_PLANNERS = ("uniform", "adatopk", "just-enough")
RATIOS = (100, 1000)
STEPS = 3


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One plan. Seconds are of one iteration."""

    compression: str
    ratio: int
    simulated_s: float
    predicted_s: float
    packed: int
    """Messages that are compressed."""
    messages: int
    kept: float
    """Of all elements that would be sent, the share that is."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    testbed: int
    scheduler: str
    stages: int
    plan_s: float
    figures: tuple[Figure, ...]
    """The dense one first; none where the model does not fit."""

    def simulated_s(self, compression: str, ratio: int = 1) -> float:
        return next(f.simulated_s for f in self.figures if (f.compression, f.ratio) == (compression, ratio))


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration of the dense equal-number plan over that of ours."""

    model: str
    testbed: int
    op_fence: float
    """op-fence alone, dense."""
    adatopk: float
    """op-fence with AdaTopK at 100: what the paper's range is of."""
    just_enough: float
    """op-fence with just-enough at 100."""
    auto: float
    """auto, dense."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    paper_speedup: str
    speedups: tuple[Speedup, ...]
    results: tuple[Result, ...]

    @property
    def good(self) -> bool:
        figures = [(f, r.figures[0]) for r in self.results for f in r.figures]
        shorter = all(f.simulated_s <= dense.simulated_s * (1 + 1e-9) for f, dense in figures)
        return shorter and all(s.adatopk > 1 for s in self.speedups)


def figure(problem: Problem, plan: Plan, compression: str, ratio: int) -> Figure:
    spec = RunSpec(steps=STEPS, micro_batches=problem.micro_batches, micro_batch_size=problem.micro_batch_size)
    sent = [
        (size, packed)
        for edge in plan.replica.edges
        for size, packed in (
            (edge.forward_bytes, edge.forward_compression),
            (edge.backward_bytes, edge.backward_compression),
        )
        if size
    ]
    total = sum(size for size, _ in sent)
    return Figure(
        compression=compression,
        ratio=ratio,
        simulated_s=steady_step_s(simulate(plan, problem.fleet, spec)),
        predicted_s=plan.predicted.step_s,
        packed=sum(packed is not None for _, packed in sent),
        messages=len(sent),
        kept=sum(size / _ratio(packed) for size, packed in sent) / total if total else 1.0,
    )


def _ratio(packed: Compression | None) -> float:
    return packed.ratio if packed else 1.0


def measure(problem: Problem, model: str, testbed: int, scheduler: str) -> Result:
    started = time.perf_counter()
    try:
        plan = SCHEDULERS[scheduler](problem)
    except FleetTooSmall:
        return Result(model=model, testbed=testbed, scheduler=scheduler, stages=0, plan_s=0.0, figures=())
    plan_s = time.perf_counter() - started
    figures = [figure(problem, plan, "dense", 1)]
    for name in RATIO_PLANNERS:
        for ratio in RATIOS:
            figures.append(figure(problem, plan_compression(name, problem, plan, ratio), name, ratio))
    return Result(
        model=model,
        testbed=testbed,
        scheduler=scheduler,
        stages=len(plan.stages),
        plan_s=plan_s,
        figures=tuple(figures),
    )


def speedups(results: list[Result]) -> Iterator[Speedup]:
    found = {(r.model, r.testbed, r.scheduler): r for r in results if r.figures}
    for model, testbed in dict.fromkeys((r.model, r.testbed) for r in results):
        base, fence, auto = (found.get((model, testbed, s)) for s in ("equal-number", "op-fence", "auto"))
        if base and fence and auto:
            dense_s = base.simulated_s("dense")
            yield Speedup(
                model=model,
                testbed=testbed,
                op_fence=dense_s / fence.simulated_s("dense"),
                adatopk=dense_s / fence.simulated_s("adatopk", 100),
                just_enough=dense_s / fence.simulated_s("just-enough", 100),
                auto=dense_s / auto.simulated_s("dense"),
            )


def table(found: Report) -> Table:
    drawn = Table("model", "bed", "scheduler", title="Seconds per iteration, simulated")
    for heading in ("GPUs", "dense", *(f"{name} {ratio}" for name in RATIO_PLANNERS for ratio in RATIOS)):
        drawn.add_column(heading, justify="right")
    base: tuple[Figure, ...] = ()
    for r in found.results:
        figures = [f"{f.simulated_s:.3g}" for f in r.figures] or ["does not fit"]
        if r.scheduler == "equal-number":
            base = r.figures[:1]
        drawn.add_row(r.model, str(r.testbed), r.scheduler, str(r.stages), *figures, end_section=r.scheduler == "auto")
        if r.scheduler == "op-fence" and base:
            gains = [f"{base[0].simulated_s / f.simulated_s:.2f}x" for f in r.figures]
            drawn.add_row("", "", "  speed-up", "", *gains, style="bold")
    drawn.caption = (
        f"speed-up: op-fence over the dense equal-number plan; the paper measured {PAPER}x for its system\n"
        "auto: with one replica; GPUs: those used, of 24 and 48"
    )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "ResNet-18 only")
    options = parser.parse_args()
    results: list[Result] = []
    for case in CASES[:1] if options.quick else CASES:
        print(f"{case.name} ...", file=sys.stderr)
        flow = case.flow()
        for testbed in (1, 2):
            problem = case.problem(flow, built_in_fleet(f"fusionllm-testbed{testbed}"))
            results += [measure(problem, case.name, testbed, scheduler) for scheduler in SCHEDULERS]
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        paper_speedup=PAPER,
        speedups=tuple(speedups(results)),
        results=tuple(results),
    )
    write_figures(options.json, found)
    Console(width=150).print(table(found))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
