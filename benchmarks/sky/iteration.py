"""Iteration time of Sky Computing's experiments in the simulator, and what the paper's savings can come from.

`python benchmarks/sky/iteration.py [--quick] [--json PATH]`

The paper's runner sends one batch of 32 through all devices, forward and then backward, before the next one starts. So
an iteration takes as long as all stages together, not as the largest. The plans of `run.py`'s planners are simulated:
as there, with the whole batch as one micro-batch, and *pipelined* in 8 micro-batches of 4.

Slow-downs are *normal* as in `run.py` (the paper's text), or *uniform*: whole numbers from 1 to 6 by numpy's generator
with seed 35, as the authors' code (github.com/hpcaitech/SkyComputing, experiment/config.py) draws them. Savings are
against the even allocation.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from bert import BATCH, bert_graph, bert_layers
from rich.console import Console
from rich.table import Table
from run import DEVICE_FLOPS_PER_S, LATENCY_S, PAPER, SCALING, problem_of

from isthmus.cost import Problem, build_plan, parameter_state
from isthmus.cost.network import Floats
from isthmus.experiments import RunSpec
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow
from isthmus.planners.baselines.allocation import (
    Allocation,
    LayerProblem,
    allocation,
    even_layers,
    sky_heuristic_layers,
)
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s
from isthmus_testing.allocation import certified_layers

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

RESULTS = Path(__file__).parent / "results" / "iteration.json"
NETWORK = Link(LATENCY_S, 10e9 / 8)
SEEDS = (0, 1, 2)
THEIR_SEED = 35
"""Of the authors' slow-downs."""
DRAWS = 100
PIPELINED = 8
"""Micro-batches."""
STOPPED_AT = 1 / (1 - 0.2)
"""How far above the optimum the authors' solver may stop: (found - bound) / found <= 0.2."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int
    encoders: int
    slow_downs: str = "normal"
    seed: int = 0
    parts: int = 5
    """Layers an encoder: five by the paper's count, three in its code."""
    memory: bool = True
    """Whether devices hold two to four equal shares only."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    setting: Setting
    planner: str
    step_s: float
    """One batch at a time: the paper's iteration."""
    compute_s: float
    """Of that, what devices compute; the rest is messages."""
    pipelined_s: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an iteration, as the sum over devices, can save against an even one; computed, messages left out."""

    setting: Setting
    balanced: float
    """All stages equally long: 1 - harmonic / arithmetic mean of the slow-downs."""
    stopped: float
    """The largest stage 25 % above that, the slowest devices empty: the most that the authors' solver may return."""
    fastest: float
    """Everything on the fastest device."""


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """What the heuristic saves with the same uniform slow-downs under other seeds; computed, messages left out."""

    nodes: int
    savings: tuple[float, ...]
    """Ascending."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    rows: tuple[Row, ...]
    limits: tuple[Limits, ...]
    draws: tuple[Draws, ...]


def factors(setting: Setting) -> Floats:
    """How many times as long a device takes: 1 + slow-down."""
    if setting.slow_downs == "uniform":
        drawn = np.random.default_rng(setting.seed).integers(1, 7, size=setting.nodes)[1:]
        return 1.0 + drawn.astype(np.float64)
    return problem_of(setting.nodes, setting.encoders, setting.seed).device_s_per_flop * DEVICE_FLOPS_PER_S


def layers_of(setting: Setting) -> LayerProblem:
    flops, size = bert_layers(setting.encoders, setting.parts)
    slow, devices = factors(setting), setting.nodes - 1
    memory = problem_of(setting.nodes, setting.encoders, setting.seed).device_memory_bytes
    return LayerProblem(
        layer_flops=flops,
        layer_memory_bytes=size,
        device_s_per_flop=slow / DEVICE_FLOPS_PER_S,
        device_memory_bytes=np.maximum(memory, 2 * size.max()) if setting.memory else np.full(devices, size.sum()),
        device_latency_s=np.full(devices, LATENCY_S),
    )


def taking_only(problem: LayerProblem) -> Allocation:
    """The heuristic as the authors' `allocator.py` has it: a slip lets devices take layers but never give any."""
    even = even_layers(problem)
    cut, flops, pace = [0, *itertools.accumulate(even.counts)], problem.flops_before, problem.device_s_per_flop
    before: list[int] = []
    while before != cut:
        before = cut[:]
        loads = [pace[d] * (flops[cut[d + 1]] - flops[cut[d]]) for d in range(problem.devices)]
        target = sum(loads) / problem.devices
        for d in range(problem.devices - 1):
            load = pace[d] * (flops[cut[d + 1]] - flops[cut[d]])
            if load < target and cut[d + 2] - cut[d + 1] > 1 and problem.fits(d, cut[d], cut[d + 1] + 1):
                cut[d + 1] += 1
    return allocation(problem, range(problem.devices), [b - a for a, b in itertools.pairwise(cut)])


PLANNERS = {
    "even": even_layers,
    "heuristic": sky_heuristic_layers,
    "heuristic, their code": taking_only,
    "certified": lambda problem: certified_layers(problem),
}


def fleet_of(problem: LayerProblem) -> Fleet:
    """Memory has been seen to by the allocation."""
    devices = tuple(
        Device(name=f"d{k}", region="cluster", flops_per_s=1 / pace, memory_bytes=1 << 50)
        for k, pace in enumerate(problem.device_s_per_flop)
    )
    return Fleet(name="cluster", devices=devices, links=Links(default=NETWORK, intra=NETWORK))


def simulated_s(setting: Setting, problem: LayerProblem, found: Allocation, micro_batches: int) -> float:
    fleet, size = fleet_of(problem), BATCH // micro_batches
    asked = Problem(
        flow=Flow(bert_graph(setting.encoders, setting.parts)),
        fleet=fleet,
        micro_batch_size=size,
        micro_batches=micro_batches,
        state=parameter_state("sgd"),
    )
    names, cut = [fleet.names[d] for d in found.order], [*itertools.accumulate(found.counts)][:-1]
    plan = build_plan(asked, names, cut, planner="given")
    return steady_step_s(simulate(plan, fleet, RunSpec(steps=3, micro_batches=micro_batches, micro_batch_size=size)))


def measure(setting: Setting, planners: Iterable[str] = PLANNERS) -> list[Row]:
    problem, rows = layers_of(setting), list[Row]()
    for name in planners:
        found = PLANNERS[name](problem)
        one, several = (simulated_s(setting, problem, found, count) for count in (1, PIPELINED))
        compute_s = _all_stages_s(problem, found)
        rows.append(Row(setting=setting, planner=name, step_s=one, compute_s=compute_s, pipelined_s=several))
    return rows


def limits(setting: Setting) -> Limits:
    slow = sorted(factors(setting).tolist())
    mean, balanced = statistics.fmean(slow), statistics.harmonic_mean(slow)
    left, total = 1.0, 0.0
    for pace in slow:
        share = min(left, STOPPED_AT * balanced / len(slow) / pace)
        left, total = left - share, total + share * pace
    return Limits(setting=setting, balanced=1 - balanced / mean, stopped=1 - total / mean, fastest=1 - slow[0] / mean)


def draws(nodes: int) -> Draws:
    savings: list[float] = []
    for seed in range(DRAWS):
        problem = layers_of(Setting(nodes=nodes, encoders=80, slow_downs="uniform", seed=seed, memory=False))
        even, heuristic = (_all_stages_s(problem, f(problem)) for f in (even_layers, sky_heuristic_layers))
        savings.append(1 - heuristic / even)
    return Draws(nodes=nodes, savings=tuple(sorted(savings)))


def _all_stages_s(problem: LayerProblem, found: Allocation) -> float:
    cut = problem.flops_before[[0, *itertools.accumulate(found.counts)]]
    return float((np.diff(cut) * problem.device_s_per_flop[list(found.order)]).sum())


def saved(rows: Sequence[Row], planner: str, figure: str = "step_s") -> float:
    """Mean over the settings, of one of the row's figures."""
    even = {row.setting: getattr(row, figure) for row in rows if row.planner == "even"}
    return statistics.fmean(1 - getattr(row, figure) / even[row.setting] for row in rows if row.planner == planner)


def scaling_table(kind: str, found: Report) -> Table:
    drawn = Table("planner", "slow-downs", title=f"{kind} scaling: saved against even (compute alone; pipelined)")
    for nodes, encoders in SCALING[kind]:
        drawn.add_column(f"{nodes} nodes, {encoders} encoders", justify="right")
    for planner, slow_downs in itertools.product([*PLANNERS][1:], ("normal", "uniform")):
        cells: list[str] = []
        for nodes, encoders in SCALING[kind]:
            rows = [r for r in found.rows if (r.setting.nodes, r.setting.encoders) == (nodes, encoders)]
            rows = [r for r in rows if r.setting.slow_downs == slow_downs and r.setting.memory and r.setting.parts == 5]
            shares = [saved(rows, planner, name) for name in ("step_s", "compute_s", "pipelined_s")] if rows else []
            cells.append("{:.1%} ({:.1%}; {:.1%})".format(*shares) if rows else "-")
        drawn.add_row(planner, slow_downs, *cells)
    for planner, theirs in PAPER[kind].items():
        drawn.add_row(f"the paper's {planner}", "", *("-" if share is None else f"{share} %" for share in theirs))
    return drawn


def limits_table(found: Report) -> Table:
    drawn = Table("nodes", "slow-downs", title="What the sum over devices can save against even")
    for heading in ("balanced", "within their solver's gap", "all on the fastest device"):
        drawn.add_column(heading, justify="right")
    grouped: dict[tuple[int, str], list[Limits]] = {}
    for limit in found.limits:
        grouped.setdefault((limit.setting.nodes, limit.setting.slow_downs), []).append(limit)
    for (nodes, slow_downs), group in grouped.items():
        means = (statistics.fmean(getattr(x, name) for x in group) for name in ("balanced", "stopped", "fastest"))
        drawn.add_row(str(nodes), slow_downs, *(f"{mean:.1%}" for mean in means))
    return drawn


def reasons_table(found: Report) -> Table:
    drawn = Table("16 nodes, 80 encoders: heuristic", title="One change after the other")
    for heading in ("as the text has it", "as their code has it"):
        drawn.add_column(heading, justify="right")
    for words, alike in _reasons().items():
        rows = [r for r in found.rows if r.setting in alike]
        drawn.add_row(words, f"{saved(rows, 'heuristic'):.1%}", f"{saved(rows, 'heuristic, their code'):.1%}")
    return drawn


def _reasons() -> Mapping[str, tuple[Setting, ...]]:
    uniform = Setting(nodes=16, encoders=80, slow_downs="uniform", seed=THEIR_SEED)
    return {
        "normal slow-downs, three seeds": tuple(Setting(nodes=16, encoders=80, seed=seed) for seed in SEEDS),
        "their slow-downs": (uniform,),
        "and no memory limits": (msgspec.structs.replace(uniform, memory=False),),
        "and three layers an encoder": (msgspec.structs.replace(uniform, memory=False, parts=3),),
    }


def settings(quick: bool) -> list[Setting]:
    pairs = list(dict.fromkeys(pair for kind in SCALING for pair in SCALING[kind]))[: 1 if quick else None]
    found = [Setting(nodes=n, encoders=e, seed=seed) for n, e in pairs for seed in SEEDS]
    found += [Setting(nodes=n, encoders=e, slow_downs="uniform", seed=THEIR_SEED) for n, e in pairs]
    return list(dict.fromkeys([*found, *(s for alike in _reasons().values() for s in alike)]))


def main() -> int:
    parser = options_of(__doc__, RESULTS, "16 nodes with 80 encoders only")
    options = parser.parse_args()
    rows: list[Row] = []
    wanted = settings(options.quick)
    for setting in wanted:
        print(f"{setting.nodes} nodes, {setting.encoders} encoders, {setting.slow_downs} ...", file=sys.stderr)
        rows += measure(setting)
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        rows=tuple(rows),
        limits=tuple(limits(s) for s in wanted if s.memory and s.encoders == 80),
        draws=tuple(draws(n) for n in dict.fromkeys(s.nodes for s in wanted)),
    )
    write_figures(options.json, found)
    console = Console(width=130)
    for kind in SCALING:
        console.print(scaling_table(kind, found))
    console.print(limits_table(found))
    console.print(reasons_table(found))
    for drawn in found.draws:
        some = drawn.savings[0], statistics.median(drawn.savings), drawn.savings[-1]
        words = ", ".join(f"{share:.1%}" for share in some)
        console.print(f"{drawn.nodes} nodes, heuristic, {DRAWS} other draws (least, median, most): {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
