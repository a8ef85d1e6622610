"""How fast DT-FM's searches find a cheap placement: its Figure 4.

`python benchmarks/dtfm/search_curves.py [--cases N ...] [--candidates N] [--json PATH] [--picture PATH]`

The cheapest placement among the first n candidates, on the five public networks, three seeds, 5,000 candidates each: a
population of 100 and 4,900 children, as in the authors' code. *random* are shuffles with the next device in line as
the next
stage, as that code draws them; *dtfm-kl* searches by the code's rules with Kernighan-Lin's gain. The file is written
after each run, and runs that it holds are not made again.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import matplotlib as mpl
import msgspec
import numpy as np
from networks import public_case
from rich.console import Console
from rich.table import Table

from isthmus.planners.placement import PlacementProblem
from isthmus.planners.placement.dtfm import CODE, PAPER, gain_of, kernighan_lin_of, search
from isthmus.planners.placement.grouping import kinds_of, landscape_of, shuffled

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
SEEDS, POPULATION, CANDIDATES = (0, 1, 2), 100, 5000
OPTIMUM_S = {1: 3.440, 2: 31.634, 3: 16.087, 4: 34.802, 5: 49.218}
"""Proven on 2026-11-21 by a bound of its own; that and the search that met it are gone since auto is never slower."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    case: int
    search: str
    seed: int
    improved: tuple[tuple[int, float, float], ...]
    """(candidates seen, CPU seconds, cost in seconds a step) at each improvement, and at the end."""

    def after(self, candidates: int) -> float:
        return next(cost for seen, _, cost in reversed(self.improved) if seen <= candidates)


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    candidates: int
    curves: tuple[Curve, ...]


def random_costs(problem: PlacementProblem, seed: int) -> Iterator[float]:
    """Shuffles as they are: no order is searched and nobody is matched."""
    rng, landscape = np.random.default_rng(seed), landscape_of(problem)
    while True:
        groups = shuffled(problem, rng)
        sync_s = max(landscape.group_s(kinds_of(problem, row)) for row in groups)
        yield sync_s + sum(float(problem.hop_s[a, b].max()) for a, b in pairwise(problem.kind[groups]))


def _searched(problem: PlacementProblem, seed: int, name: str) -> Iterator[float]:
    rules = PAPER if name == "dtfm-genetic" else CODE
    gain = kernighan_lin_of(problem) if name == "dtfm-kl" else gain_of(problem, rules)
    return (found.total_s for found in search(problem, gain, rules, seed=seed, population=POPULATION))


SEARCHES: dict[str, Callable[[PlacementProblem, int], Iterator[float]]] = {
    "random": random_costs,
    "dtfm-kl": lambda problem, seed: _searched(problem, seed, "dtfm-kl"),
    "dtfm-genetic": lambda problem, seed: _searched(problem, seed, "dtfm-genetic"),
    "dtfm-genetic-code": lambda problem, seed: _searched(problem, seed, "dtfm-genetic-code"),
}


def curve(case: int, name: str, seed: int, candidates: int) -> Curve:
    start, best, improved, spent = time.process_time(), float("inf"), list[tuple[int, float, float]](), 0.0
    for seen, cost in enumerate(islice(SEARCHES[name](public_case(case), seed), candidates), 1):
        spent = time.process_time() - start
        if cost < best * (1 - 1e-12):
            best = cost
            improved.append((seen, round(spent, 3), cost))
    improved.append((candidates, round(spent, 3), best))
    return Curve(case=case, search=name, seed=seed, improved=tuple(improved))


def table(found: Curves) -> Table:
    drawn = Table("case", "search", title=f"Seconds a step under DT-FM's cost, {found.candidates:,} candidates")
    for heading in ("after 100", "500", "1,000", "2,500", "the end", "best of the seeds", "optimum", "CPU time"):
        drawn.add_column(heading, justify="right")
    for case, name in dict.fromkeys((c.case, c.search) for c in found.curves):
        ours = [c for c in found.curves if (c.case, c.search) == (case, name)]
        means = (statistics.fmean(c.after(n) for c in ours) for n in (100, 500, 1000, 2500, found.candidates))
        drawn.add_row(
            str(case),
            name,
            *(f"{mean:.3f}" for mean in means),
            f"{min(c.improved[-1][2] for c in ours):.3f}",
            f"{OPTIMUM_S[case]:.3f}",
            f"{statistics.fmean(c.improved[-1][1] for c in ours):.0f} s",
            end_section=name == [*SEARCHES][-1],
        )
    return drawn


def draw(found: Curves, path: Path) -> None:
    """A panel a case: the mean of the seeds, and between them the shade."""
    cases = sorted({c.case for c in found.curves})
    figure, panels = plt.subplots(1, len(cases), figsize=(3.2 * len(cases), 3.2), squeeze=False)
    at = np.unique(np.geomspace(1, found.candidates, 200).astype(int))
    for panel, case in zip(panels[0], cases, strict=True):
        for name in SEARCHES:
            ours = [[c.after(n) for n in at] for c in found.curves if (c.case, c.search) == (case, name)]
            if ours:
                panel.plot(at, np.mean(ours, axis=0), label=name, linestyle="--" if name == "random" else "-")
                panel.fill_between(at, np.min(ours, axis=0), np.max(ours, axis=0), alpha=0.15)
        panel.axhline(OPTIMUM_S[case], color="black", linewidth=0.8, linestyle=":", label="proven optimum")
        panel.set(title=f"case {case}", xscale="log", xlabel="candidates", ylim=(0, None))
    panels[0][0].set_ylabel("seconds a step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncol=len(labels), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measured(cases: Sequence[int], candidates: int, path: Path) -> Curves:
    found = Curves(candidates=candidates, curves=())
    if path.exists():
        before = msgspec.json.decode(path.read_bytes(), type=Curves)
        found = before if before.candidates == candidates else found
    known = {(c.case, c.search, c.seed): c for c in found.curves}
    for key in itertools.product(cases, SEARCHES, SEEDS):
        if key not in known:
            known[key] = curve(*key, candidates)
            print(*key, f"{known[key].improved[-1][2]:.3f}", file=sys.stderr)
            ordered = sorted(known.values(), key=lambda c: (c.case, [*SEARCHES].index(c.search), c.seed))
            found = Curves(candidates=candidates, curves=tuple(ordered))
            write_figures(path, found)
    return found


def main() -> int:
    parser = options_of(__doc__, RESULTS / "search-curves.json")
    parser.add_argument("--cases", nargs="*", type=int, choices=[*OPTIMUM_S], default=[*OPTIMUM_S], metavar="N")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, metavar="N")
    parser.add_argument("--picture", type=Path, default=RESULTS / "search-curves.png", metavar="PATH")
    options = parser.parse_args()
    found = measured(options.cases, options.candidates, options.json)
    Console(width=150).print(table(found))
    draw(found, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
