"""Federated rounds on the virtual clock: how much longer than the bound, by schedule, stealing, and window of times.

`python benchmarks/federated_scheduling/run.py [--quick] [--json PATH]`

1,000 clients a round on executors that are equal, 1:2:4:8, or unstable as in Parrot (Section 5.1 and Fig. 11), with and
without 30 % noise in every client's time. The machines are those of a real run. And how long it takes to plan and
simulate a round of a million clients on 10,000 executors.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from bounds import bound_s
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.simulator.rounds import FederatedCosts, SimulatedRound
from isthmus_testing.virtual_runs import simulate_federated

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
CLIENTS, PER_ROUND, ROUNDS, SKIPPED = 3400, 1000, 40, 5
NOISE = 0.3
LATENCY_S = 0.0005
LINE = LinearFit(0.0005, 0.01)
"""A tenth of a second for a client of 180 samples."""
Factor = Callable[[int, int], float]
SETTINGS: dict[str, tuple[tuple[float, ...], Factor]] = {
    "stable": ((1.0,) * 4, lambda executor, round_: 1.0),
    "heterogeneous": ((1.0, 2.0, 4.0, 8.0), lambda executor, round_: 1.0),
    "unstable": ((1.0,) * 4, lambda executor, round_: 2 + math.cos(3.14 * round_ / ROUNDS + executor)),
}
PARROT = RoundRules(rounds=ROUNDS, needed=PER_ROUND, planner="parrot", steals=False, warm_up_rounds=1)
CERTIFIED = RoundRules(rounds=ROUNDS, needed=PER_ROUND, steals=False)
STRATEGIES: dict[str, tuple[RoundRules, int | None]] = {
    "uniform": (msgspec.structs.replace(PARROT, planner="uniform"), 5),
    "parrot, all history": (PARROT, None),
    "parrot, window 5": (PARROT, 5),
    "certified, window 5": (CERTIFIED, 5),
    "certified, window 1": (CERTIFIED, 1),
    "certified and stealing": (msgspec.structs.replace(CERTIFIED, steals=True), 5),
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy in one setting, over the rounds after the first `SKIPPED`."""

    setting: str
    noise: float
    strategy: str
    over_bound: float
    """Mean of the round's time over the bound of the expected times."""
    worst_over_bound: float
    error: float | None
    """Mean |predicted - taken| / taken over clients."""
    stolen: float


class Large(msgspec.Struct, frozen=True, kw_only=True):
    executors: int
    clients: int
    rounds: int
    cpu_s: float
    """Of one thread, planning and simulating all rounds."""
    last_round_s: float
    """Virtual seconds."""


def main() -> None:
    parser = options_of(__doc__, LATEST, "no noise, and a large round of 100,000 clients")
    options = parser.parse_args()
    sizes = leaf_sizes(CLIENTS)
    outcomes = [
        measure(setting, noise, strategy, sizes)
        for setting in SETTINGS
        for noise in ((0.0,) if options.quick else (0.0, NOISE))
        for strategy in STRATEGIES
    ]
    large = simulate_large(1000 if options.quick else 10_000, 100_000 if options.quick else 1_000_000)
    show(outcomes, large)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "outcomes": msgspec.to_builtins(outcomes),
        "large": msgspec.to_builtins(large),
    }
    write_figures(options.json, document)


def leaf_sizes(clients: int) -> NDArray[np.int64]:
    """Samples per client in the shape of LEAF's FEMNIST: log-normal, mean 227, deviation 89."""
    variance = math.log1p((88.94 / 226.83) ** 2)
    drawn = np.random.default_rng(0).lognormal(math.log(226.83) - variance / 2, math.sqrt(variance), clients)
    return np.clip(drawn.round(), 10, 1200).astype(np.int64)


def members(round_: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng([1, round_]).choice(CLIENTS, PER_ROUND, replace=False))


def measure(setting: str, noise: float, strategy: str, sizes: NDArray[np.int64]) -> Outcome:
    speeds, factor = SETTINGS[setting]
    rules, window = STRATEGIES[strategy]
    lines = tuple(LinearFit(LINE.seconds_per_sample * s, LINE.fixed_s * s) for s in speeds)
    machine = Rounds(
        [f"executor-{k}" for k in range(len(lines))],
        rules,
        sizes,
        members,
        ThroughputModel(len(lines), window_rounds=window or 0),
    )
    costs = FederatedCosts(
        lines=lines, noise=noise, latency_s=LATENCY_S, factor=lambda k, phase: factor(k, phase.round)
    )
    rounds = simulate_federated(machine, costs, seed=7)[SKIPPED:]
    over = [
        r.seconds / bound_s(sizes[members(n)], lines, [factor(k, n) for k in range(len(lines))])
        for r in rounds
        for n in [r.record.round]
    ]
    errors = [e for r in rounds if (e := error(r)) is not None]
    return Outcome(
        setting=setting,
        noise=noise,
        strategy=strategy,
        over_bound=statistics.fmean(over),
        worst_over_bound=max(over),
        error=statistics.fmean(errors) if errors else None,
        stolen=statistics.fmean(r.record.stolen for r in rounds),
    )


def error(round_: SimulatedRound) -> float | None:
    lines = round_.record.lines
    errors = [
        abs(lines[name].seconds(t.samples) - t.seconds) / t.seconds
        for name, timed in round_.record.trained.items()
        if name in lines
        for t in timed
    ]
    return statistics.fmean(errors) if errors else None


def simulate_large(executors: int, clients: int) -> Large:
    """Two rounds of the whole population: one by sample counts alone, one by measured times; stealing in both."""
    sizes = leaf_sizes(clients)
    speeds = np.random.default_rng(3).uniform(1, 4, executors)
    lines = tuple(LinearFit(LINE.seconds_per_sample * s, LINE.fixed_s) for s in speeds.tolist())
    before_s = time.process_time()
    everybody = np.arange(clients)
    machine = Rounds(
        [f"executor-{k}" for k in range(executors)],
        RoundRules(rounds=2, needed=clients, steals=True),
        sizes,
        lambda _: everybody,
        ThroughputModel(executors, window_rounds=5),
    )
    rounds = simulate_federated(machine, FederatedCosts(lines=lines, noise=NOISE, latency_s=LATENCY_S))
    cpu_s = time.process_time() - before_s
    return Large(executors=executors, clients=clients, rounds=2, cpu_s=cpu_s, last_round_s=rounds[-1].seconds)


def show(outcomes: list[Outcome], large: Large) -> None:
    table = Table(title=f"{PER_ROUND:,} clients a round, 4 executors, rounds {SKIPPED} to {ROUNDS}")
    for column in ("setting", "noise", "strategy", "over bound", "worst", "time error", "stolen"):
        table.add_column(column, justify="left" if column in ("setting", "strategy") else "right")
    for o in outcomes:
        table.add_row(
            o.setting,
            f"{o.noise:.0%}",
            o.strategy,
            f"{o.over_bound:.3f}",
            f"{o.worst_over_bound:.3f}",
            "-" if o.error is None else f"{o.error:.1%}",
            f"{o.stolen:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{large.rounds} rounds of {large.clients:,} clients on {large.executors:,} executors: planned and "
        f"simulated in {large.cpu_s:.1f} s of CPU"
    )


if __name__ == "__main__":
    main()
