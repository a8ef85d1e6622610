"""Sync schedules: how much averaging stays exposed, and how long does planning take?

`python benchmarks/dream/run.py [--quick] [--json PATH]`

The planners on DreamDDP's published profiles of GPT-2, on the shapes of the paper's models at 10 MB/s to
10 GB/s, and on random layers up to 1,000 with periods up to 100. Exposed time is per iteration, under the true serial
channel. Ends with 1 if a schedule in intervals
is better than the exact one, or the exact one takes more than 5 ms at 70 layers, H = 5.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from shapes import MODELS, model_times, problem_of, published, random_times

from isthmus.planners.sync import SyncProblem, plan_sync
from isthmus.planners.sync.baselines import search
from isthmus.planners.sync.timeline import iteration_s, timeline
from isthmus.plans import SyncPlan

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import in_time, machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
BRUTE_LAYERS, BRUTE_SCHEDULES = 30, 100_000
PLAN_LIMIT_S, PLAN_LAYERS, PLAN_ITERATIONS = 5e-3, 70, 5
REPEATS = 5
PLANNED = ("dream", "dream-dfs", "dream-brute", "dream-spread")
SLOW = ("dream-brute", "dream-spread")
INTERVALS = ("equal-number", "dream-dfs", "dream", "dream-brute")
BANDWIDTHS = {"10 MB/s": 10e6, "100 MB/s": 100e6, "1 GB/s": 1e9, "10 GB/s": 10e9}
RANDOM = ((10, 2), (10, 5), (20, 5), (30, 5), (70, 5), (100, 10), (300, 20), (1000, 2), (1000, 20), (1000, 100))


class Case(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    name: str
    backward_s: list[float]
    average_s: list[float]
    iterations: int
    published_step_s: dict[str, float] = {}

    def problem(self, *, overlap: bool = False) -> SyncProblem:
        return problem_of(self.backward_s, self.average_s, self.iterations, overlap=overlap)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Exposed seconds are per iteration."""

    group: str
    name: str
    layers: int
    iterations: int
    backward_s: float
    exposed_s: dict[str, float]
    """By planner; `forward-overlap` is `dream` where the tail may overlap the next forward."""
    bound_s: float
    """What no assignment hides."""
    plan_s: dict[str, float]
    """Best of several."""
    filled: dict[str, int]
    """Averages that bubble filling adds per period."""
    dfs_leaves: int
    over_wfbp: float
    """WFBP's iteration (every layer in every iteration) / dream's."""
    over_lsgd: float
    """LSGD's iteration (everything after the last, in the open) / dream's."""
    published_step_s: dict[str, float]

    @property
    def good(self) -> bool:
        exact = self.exposed_s["dream"]
        others = [self.exposed_s[name] for name in INTERVALS if name in self.exposed_s]
        return all(exact <= exposed_s * (1 + 1e-9) + 1e-15 for exposed_s in others)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    plan_70_layers_s: float
    results: tuple[Result, ...]

    @property
    def good(self) -> bool:
        return all(r.good for r in self.results) and in_time(self.plan_70_layers_s, PLAN_LIMIT_S)


def cases(*, quick: bool) -> Iterator[Case]:
    for profile in published().profiles:
        for iterations in (5, 10):
            yield Case(
                group="published profile",
                name=profile.name,
                backward_s=list(profile.backward_s),
                average_s=list(profile.average_s),
                iterations=iterations,
                published_step_s=profile.published_step_s if iterations == 10 else {},
            )
    for name in MODELS:
        for text, bandwidth in list(BANDWIDTHS.items())[2 if quick else 0 :]:
            backward_s, average_s = model_times(name, bandwidth)
            yield Case(
                group="shape of a paper model",
                name=f"{name}, {text}",
                backward_s=backward_s,
                average_s=average_s,
                iterations=5,
            )
    for layers, iterations in RANDOM[: 5 if quick else None]:
        backward_s, average_s = random_times(layers, iterations, seed=layers + iterations)
        yield Case(
            group="random layers",
            name="log-normal",
            backward_s=backward_s,
            average_s=average_s,
            iterations=iterations,
        )


def timed(name: str, problem: SyncProblem, repeats: int) -> tuple[SyncPlan, float]:
    taken: list[float] = []
    while True:
        start = time.perf_counter()
        plan = plan_sync(name, problem)
        taken.append(time.perf_counter() - start)
        if len(taken) >= repeats:
            return plan, min(taken)


def measure(case: Case) -> Result:
    problem, count = case.problem(), len(case.backward_s)
    names = ["equal-number", "dream-dfs", "dream", "dream-spread"]
    schedules = math.comb(count + case.iterations - 1, count)
    if count <= BRUTE_LAYERS and schedules <= BRUTE_SCHEDULES:
        names.append("dream-brute")
    planned = {name: timed(name, problem, 1 if name in SLOW else REPEATS) for name in names}
    exact, _ = planned["dream"]
    line = timeline(problem.workers, forward_overlap=False)
    overlapped = plan_sync("dream", case.problem(overlap=True))
    lsgd_s = line.compute_s + sum(case.average_s) / case.iterations
    return Result(
        group=case.group,
        name=case.name,
        layers=count,
        iterations=case.iterations,
        backward_s=sum(case.backward_s),
        exposed_s={
            **{name: plan.exposed_s / case.iterations for name, (plan, _) in planned.items()},
            "forward-overlap": overlapped.exposed_s / case.iterations,
        },
        bound_s=exact.certificate.lower_bound / case.iterations - line.compute_s,
        plan_s={name: taken_s for name, (_, taken_s) in planned.items()},
        filled={name: sum(len(i.filled) for i in plan.iterations) for name, (plan, _) in planned.items()},
        dfs_leaves=search(line, case.iterations).leaves,
        over_wfbp=iteration_s(line, range(count)) / exact.step_s,
        over_lsgd=lsgd_s / exact.step_s,
        published_step_s=case.published_step_s,
    )


def table(found: Report) -> Table:
    drawn = Table("", "layers", "H", title="Sync schedules: exposed averaging per iteration, ms", pad_edge=False)
    drawn.columns[0].no_wrap = True
    exposed_columns = ("backward", *INTERVALS, "dream-spread", "forward-overlap", "bound")
    headings = (*exposed_columns, "fills", "/ WFBP", "/ LSGD", *(f"plan {n}" for n in PLANNED), "leaves", "theirs s")
    for heading in (*headings, "ours s"):
        drawn.add_column(heading.replace("-", " "), justify="right")
    group = ""
    for r in found.results:
        if r.group != group:
            group = r.group
            drawn.add_section()
        exposed = [r.exposed_s.get(name) for name in (*INTERVALS, "dream-spread", "forward-overlap")]
        theirs = r.published_step_s.get("dream_ddp")
        drawn.add_row(
            r.name,
            str(r.layers),
            str(r.iterations),
            _ms(r.backward_s),
            *[_ms(s) for s in exposed],
            _ms(r.bound_s),
            f"{r.filled['dream-dfs']}/{r.filled['dream']}",
            f"{r.over_wfbp:.2f}",
            f"{r.over_lsgd:.2f}",
            *[_ms(r.plan_s.get(name)) for name in PLANNED],
            f"{r.dfs_leaves:.2g}",
            f"{theirs:.4f}" if theirs else "",
            f"{r.backward_s + r.exposed_s['dream']:.4f}" if theirs else "",
        )
    drawn.caption = (
        "forward overlap: dream, the tail under the next forward; bound: what no assignment hides; fills: dream-dfs / "
        "dream; / WFBP, / LSGD: their iteration over dream's; plan: ms; leaves: of the paper's search; theirs, ours: "
        "DreamDDP's published iteration, and dream's, without the forward"
    )
    return drawn


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def main() -> int:
    parser = options_of(__doc__, LATEST, "two bandwidths, random layers up to 70")
    options = parser.parse_args()
    results = tuple(measure(case) for case in cases(quick=options.quick))
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        plan_70_layers_s=next(
            r.plan_s["dream"] for r in results if (r.layers, r.iterations) == (PLAN_LAYERS, PLAN_ITERATIONS)
        ),
        results=results,
    )
    write_figures(options.json, found)
    Console(width=240).print(table(found))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
