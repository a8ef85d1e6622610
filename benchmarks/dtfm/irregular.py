"""Networks on which every link differs: `islands` by its default options against DT-FM's search in 10 CPU seconds.

`python benchmarks/dtfm/irregular.py [--quick] [--json PATH] [--networks N]`

64 devices, eight stages of eight replicas, seeds 0, 1, ... *Sites* are the irregular networks of `networks.py`; on
*uniform* ones latency and bandwidth of every link are draws of their own. DT-FM's search runs by its paper's rules
with a population of 100. The file is written after each network, and networks that it holds are not measured again.
Ends with 1 unless the median of the sites is at least 14 % below DT-FM's and no run of `islands` took more than 10 CPU
seconds.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from networks import irregular, uniform
from rich.console import Console
from rich.table import Table

from isthmus.planners.placement import PlacementProblem, islands
from isthmus.planners.placement.dtfm import PAPER, gain_of, search
from isthmus_testing.placement import lower_bound_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "irregular.json"
NETWORKS: Mapping[str, Callable[[int], PlacementProblem]] = {"sites": irregular, "uniform": uniform}
BUDGET_S, POPULATION, SAVED = 10.0, 100, 0.14


class Row(msgspec.Struct, frozen=True, kw_only=True):
    network: str
    seed: int
    islands_s: float
    islands_cpu_s: float
    genetic_s: float
    bound_s: float
    bound_cpu_s: float

    @property
    def saved(self) -> float:
        return 1 - self.islands_s / self.genetic_s

    @property
    def gap(self) -> float:
        return self.islands_s / self.bound_s - 1


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[Row, ...]


def genetic_s(problem: PlacementProblem, seed: int) -> float:
    """The cheapest candidate within the budget."""
    until, best = time.process_time() + BUDGET_S, float("inf")
    for found in search(problem, gain_of(problem, PAPER), PAPER, seed=seed, population=POPULATION):
        best = min(best, found.total_s)
        if time.process_time() > until:
            return best
    return best


def measured(network: str, seed: int) -> Row:
    problem = NETWORKS[network](seed)
    start = time.process_time()
    found = islands(problem, seed=seed)
    islands_cpu_s = time.process_time() - start
    start = time.process_time()
    bound_s = lower_bound_s(problem, found.total_s)
    return Row(
        network=network,
        seed=seed,
        islands_s=found.total_s,
        islands_cpu_s=islands_cpu_s,
        bound_s=bound_s,
        bound_cpu_s=time.process_time() - start,
        genetic_s=genetic_s(problem, seed),
    )


def table(rows: tuple[Row, ...]) -> Table:
    drawn = Table("network", title="Seconds a step under DT-FM's cost function, median (least to most)")
    for heading in ("seeds", "islands", "CPU time", "dtfm-genetic, 10 CPU s", "below it", "bound", "gap", "CPU time"):
        drawn.add_column(heading, justify="right")
    for network in dict.fromkeys(row.network for row in rows):
        ours = [row for row in rows if row.network == network]
        drawn.add_row(
            network,
            str(len(ours)),
            spread([row.islands_s for row in ours], "{:.2f}"),
            spread([row.islands_cpu_s for row in ours], "{:.1f} s"),
            spread([row.genetic_s for row in ours], "{:.2f}"),
            spread([row.saved for row in ours], "{:.1%}"),
            spread([row.bound_s for row in ours], "{:.2f}"),
            spread([row.gap for row in ours], "{:.0%}"),
            spread([row.bound_cpu_s for row in ours], "{:.1f} s"),
        )
    return drawn


def spread(numbers: list[float], drawn: str) -> str:
    median, least, most = (drawn.format(n) for n in (statistics.median(numbers), min(numbers), max(numbers)))
    return f"{median} ({least} to {most})"


def main() -> int:
    parser = options_of(__doc__, LATEST, "two networks of each kind")
    parser.add_argument("--networks", type=int, default=20, metavar="N", help="of each kind")
    options = parser.parse_args()
    path: Path = options.json
    rows = msgspec.json.decode(path.read_bytes(), type=Rows).rows if path.exists() else ()
    seeds = range(2 if options.quick else options.networks)
    for network, seed in itertools.product(NETWORKS, seeds):
        if (network, seed) not in {(row.network, row.seed) for row in rows}:
            rows = (*rows, measured(network, seed))
            print(f"{network} {seed}: {rows[-1]}", file=sys.stderr)
            write_figures(path, Rows(rows=rows))
    Console(width=170).print(table(rows))
    saved = statistics.median(row.saved for row in rows if row.network == "sites")
    return 0 if saved >= SAVED and max(row.islands_cpu_s for row in rows) <= BUDGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
