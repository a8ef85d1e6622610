"""Cohort schedules: how far from the best possible round are uniform, Parrot's and the certified schedule?

`python benchmarks/cohort/run.py [--quick] [--json PATH]`

Rounds of 100 to 10,000 clients on 4 to 256 executors. Every gap is to the lower bound that `certified` proves, so the
true distance to the best schedule is at most that.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from isthmus.planners.cohort import CohortProblem, certified, fractional, parrot, uniform
from isthmus.planners.cohort.problem import Floats

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import in_time, machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
Sizes = Literal["uniform", "lognormal", "pareto"]
SIZES: tuple[Sizes, ...] = ("uniform", "lognormal", "pareto")
SHAPES = (
    (100, 4),
    (100, 8),
    (100, 32),
    (100, 100),
    (100, 256),
    (1000, 4),
    (1000, 8),
    (1000, 32),
    (1000, 256),
    (10_000, 4),
    (10_000, 32),
    (10_000, 256),
)
DEMANDED = (1000, 32)
GAP_LIMIT, SECONDS_LIMIT = 0.002, 0.2
SEEDS = 5
TIMINGS = 3
"""Of each, the fastest counts. CPU time of one thread: the machine is shared, and other work only adds."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One shape; gaps by seed, as shares of the lower bound, and the median CPU seconds of planning."""

    sizes: Sizes
    clients: int
    executors: int
    spread: float
    """Slowest over fastest t_k."""
    uniform_gaps: tuple[float, ...]
    parrot_gaps: tuple[float, ...]
    certified_gaps: tuple[float, ...]
    raised: tuple[float, ...]
    """How far the bound lies above the fractional optimum, as a share."""
    parrot_s: float
    certified_s: float
    slowest_certified_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    demanded_gap: float
    """The largest at 1,000 clients on 32 executors."""
    demanded_s: float
    results: tuple[Result, ...]

    @property
    def good(self) -> bool:
        return self.demanded_gap <= GAP_LIMIT and in_time(self.demanded_s, SECONDS_LIMIT)


def cohort(sizes: Sizes, clients: int, executors: int, *, spread: float, seed: int) -> CohortProblem:
    """Sizes in samples: 20-400; about 150 with a tail; or 50 and more with a tail that has no variance.

    t_k is drawn from 10 ms to `spread` times that, evenly on the logarithm, and b_k from 0.2-0.6 s.
    """
    random = np.random.default_rng([seed, clients, executors])
    drawn: dict[Sizes, Floats] = {
        "uniform": random.uniform(20, 400, clients),
        "lognormal": random.lognormal(5, 0.8, clients),
        "pareto": (random.pareto(1.5, clients) + 1) * 50,
    }
    return CohortProblem(
        sizes=np.ceil(drawn[sizes]),
        seconds_per_sample=0.01 * np.exp(random.uniform(0, np.log(spread), executors)),
        fixed_s=random.uniform(0.2, 0.6, executors),
    )


def measure(sizes: Sizes, clients: int, executors: int, *, spread: float, seeds: int) -> Result:
    gaps: dict[str, list[float]] = {"uniform": [], "parrot": [], "certified": []}
    seconds: dict[str, list[float]] = {"parrot": [], "certified": []}
    raised: list[float] = []
    for seed in range(seeds):
        problem = cohort(sizes, clients, executors, spread=spread, seed=seed)
        bound_s = certified(problem).lower_bound_s or 0.0
        raised.append(bound_s / fractional(problem).lower_bound_s - 1)
        for algorithm in (uniform, parrot, certified):
            made = algorithm(problem)
            gaps[made.algorithm].append(made.makespan_s / bound_s - 1)
        for algorithm in (parrot, certified):
            timings: list[float] = []
            for _ in range(TIMINGS):
                start_s = time.process_time()
                algorithm(problem)
                timings.append(time.process_time() - start_s)
            seconds[algorithm.__name__].append(min(timings))
    return Result(
        sizes=sizes,
        clients=clients,
        executors=executors,
        spread=spread,
        raised=tuple(raised),
        uniform_gaps=tuple(gaps["uniform"]),
        parrot_gaps=tuple(gaps["parrot"]),
        certified_gaps=tuple(gaps["certified"]),
        parrot_s=statistics.median(seconds["parrot"]),
        certified_s=statistics.median(seconds["certified"]),
        slowest_certified_s=max(seconds["certified"]),
    )


def table(found: Report, seeds: int) -> Table:
    drawn = Table("sizes", title=f"Cohort schedules: time of a round above the proven lower bound, {seeds} seeds")
    headings = (
        "clients",
        "executors",
        "t_k",
        "uniform",
        "parrot",
        "certified",
        "worst",
        "bound raised",
        "parrot",
        "certified",
        "slowest",
    )
    for heading in headings:
        drawn.add_column(heading, justify="right")
    for r in found.results:
        mean = statistics.fmean
        drawn.add_row(
            r.sizes,
            f"{r.clients:,}",
            str(r.executors),
            f"1-{r.spread:g}" if r.spread > 1 else "equal",
            f"{mean(r.uniform_gaps):.0%}",
            f"{mean(r.parrot_gaps):.2%}",
            f"{mean(r.certified_gaps):.3%}",
            f"{max(r.certified_gaps):.3%}",
            f"{abs(mean(r.raised)):.0%}",
            f"{r.parrot_s * 1e3:.1f} ms",
            f"{r.certified_s * 1e3:.1f} ms",
            f"{r.slowest_certified_s * 1e3:.1f} ms",
        )
    drawn.caption = (
        "gaps: mean over the seeds, and the worst; bound raised: above the fractional optimum; times: CPU, median "
        f"and slowest\ndemanded at 1,000 x 32: {GAP_LIMIT:.1%} in {SECONDS_LIMIT} s; found {found.demanded_gap:.3%} in "
        f"{found.demanded_s:.3f} s at worst"
    )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "one seed, at most 1,000 clients")
    options = parser.parse_args()
    seeds = 1 if options.quick else SEEDS
    results: list[Result] = []
    for sizes in SIZES:
        shapes = [(clients, executors, 10.0) for clients, executors in SHAPES]
        for clients, executors, spread in (*shapes, (*DEMANDED, 1.0)):
            if not (options.quick and clients > 1000):
                print(f"{sizes}, {clients} x {executors} ...", file=sys.stderr)
                results.append(measure(sizes, clients, executors, spread=spread, seeds=seeds))
    demanded = [r for r in results if (r.clients, r.executors) == DEMANDED]
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        demanded_gap=max(max(r.certified_gaps) for r in demanded),
        demanded_s=max(r.slowest_certified_s for r in demanded),
        results=tuple(results),
    )
    write_figures(options.json, found)
    Console(width=150).print(table(found, seeds))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
