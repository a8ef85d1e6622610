"""Does plain annealing find a better plan than `auto`? A test of `auto`, not a planner.

`python benchmarks/auto/anneal.py [--quick] [--seconds S] [--fleets N] [--first SEED] [--json PATH]`

Random fleets of 4 to 16 devices, drawn as in `cases.py`; 1999 is the job of README, seeds from 2000 on have 2 to 32
devices, and from 3000 on captured models. From the plan of `auto`, or from whole replicas on any set of devices if
these are faster, random moves change cuts, exchange devices, add and drop stages and whole replicas; micro-batches are
shared out anew after each. Every plan takes what the simulator says. The file is written after each fleet, and fleets
that it holds are not annealed again. Ends with 1 where annealing for S CPU seconds (60) finds a plan that is more than
1 % faster.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from captured import captured, with_model
from cases import case_of
from rich.console import Console
from rich.table import Table

from isthmus.cost import PlanLayout, Problem, build_replicas, layouts_of
from isthmus.errors import FleetTooSmall, UserError
from isthmus.experiments import RunSpec
from isthmus.fleet import resolve_fleet
from isthmus.job import load_job, prepare
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "anneal.json"
FLEETS, SECONDS, QUICK_FLEETS, QUICK_SECONDS = 50, 60.0, 4, 5.0
HOT, COLD = 0.05, 5e-4
"""First and last temperature as shares of the step of `auto`."""
MOST_GAINED = 0.01
EXAMPLE, WIDE, CAPTURED = 1999, 2000, 3000
"""Seeds of README's job, and from which fleets have 2 to 32 devices, and models are captured. Planning was not tuned on
these."""
MODELS = ("deep gpt", "tied llama", "deep unet", "resnet", "towers", "tied gpt", "llama")
STEPS = 4
"""Simulated."""
MOST_WHOLE = 12
"""Devices of which every set is tried as whole replicas."""


class Pipeline(NamedTuple):
    order: tuple[str, ...]
    boundaries: tuple[int, ...]


Layout = tuple[Pipeline, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    model: str = ""
    devices: int
    micro_batches: int
    cpu_s: float = 0.0
    """Of planning."""
    auto_s: float
    whole_s: float | None
    """Of whole replicas on the best set of devices; None where no device holds the model."""
    annealed_s: float
    auto_replicas: int
    annealed_replicas: int
    moves: int

    @property
    def gained(self) -> float:
        return 1 - self.annealed_s / self.auto_s


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    rows: tuple[Row, ...]


def case(seed: int) -> Problem:
    if seed == EXAMPLE:
        job = load_job(Path(__file__).parents[2] / "examples" / "gpt-stdlib.toml")
        return prepare(job).problem(resolve_fleet(job.fleet))
    source = random.Random(f"anneal {seed}")
    devices = source.randint(4, 16) if seed < WIDE else round(2 * 16 ** source.random())
    problem = case_of(source, devices, source.choice((8, 16, 32)), f"anneal-{seed}")
    return problem if seed < CAPTURED else with_model(problem, captured(MODELS[(seed - CAPTURED) % len(MODELS)]))


def simulated_s(problem: Problem, plan: Plan) -> float:
    spec = RunSpec(steps=STEPS, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
    return steady_step_s(simulate(plan, problem.fleet, spec))


class Costs:
    """What layouts take by the simulator."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._times = cache(self._alone)

    def step_s(self, layout: Layout) -> float:
        """Infinite where something does not fit."""
        if not 0 < len(layout) <= min(self._problem.micro_batches, self._problem.most_replicas):
            return math.inf
        with contextlib.suppress(FleetTooSmall, UserError):
            shares = self._shares(layout)
            layouts = [PlanLayout(*pipeline, share) for pipeline, share in zip(layout, shares, strict=True)]
            return simulated_s(self._problem, build_replicas(self._problem, layouts, planner="anneal"))
        return math.inf

    def holds(self, name: str) -> bool:
        """Whether the device has room for the whole model with one micro-batch."""
        with contextlib.suppress(FleetTooSmall):
            one = replace(self._problem, micro_batches=1)
            return bool(build_replicas(one, [PlanLayout((name,), (), 1)], planner="anneal"))
        return False

    def _shares(self, layout: Layout) -> list[int]:
        """The replica that would end first takes the next micro-batch."""
        times = [self._times(pipeline) for pipeline in layout]
        heap = [(fill_s + period_s, k) for k, (fill_s, period_s) in enumerate(times)]
        heapq.heapify(heap)
        shares = [1] * len(layout)
        for _ in range(self._problem.micro_batches - len(layout)):
            ends_s, k = heap[0]
            shares[k] += 1
            heapq.heapreplace(heap, (ends_s + times[k][1], k))
        return shares

    def _alone(self, pipeline: Pipeline) -> tuple[float, float]:
        """Fill and period."""
        few = max(1, self._problem.micro_batches // 4)
        layout = PlanLayout(*pipeline, few)
        predicted = build_replicas(replace(self._problem, micro_batches=few), [layout], planner="anneal").predicted
        return predicted.fill_s, predicted.period_s


class Moves:
    """Random neighbours of a layout; None where the move that was drawn is not possible."""

    def __init__(self, problem: Problem, source: random.Random) -> None:
        self._names, self._source = problem.fleet.names, source
        self._places = range(1, len(problem.flow.operators))

    def neighbour(self, layout: Layout) -> Layout | None:
        moves: Sequence[Callable[[Layout], Layout | None]] = (
            self._cut,
            self._cut,
            self._exchange,
            self._exchange,
            self._drop,
            self._insert,
            self._pass_on,
            self._new_replica,
            self._drop_replica,
        )
        return self._source.choice(moves)(layout)

    def _cut(self, layout: Layout) -> Layout | None:
        k = self._source.randrange(len(layout))
        order, boundaries = layout[k]
        if not boundaries:
            return None
        j = self._source.randrange(len(boundaries))
        at = self._places.index(boundaries[j]) + self._source.choice((-3, -2, -1, 1, 2, 3))
        if not 0 <= at < len(self._places):
            return None
        moved = (*boundaries[:j], self._places[at], *boundaries[j + 1 :])
        return _with(layout, k, Pipeline(order, moved)) if list(moved) == sorted(set(moved)) else None

    def _exchange(self, layout: Layout) -> Layout | None:
        """Two devices, of which one may be idle."""
        a = self._source.choice([name for pipeline in layout for name in pipeline.order])
        b = self._source.choice(self._names)
        swap = {a: b, b: a}
        return tuple(p._replace(order=tuple(swap.get(name, name) for name in p.order)) for p in layout)

    def _drop(self, layout: Layout) -> Layout | None:
        k = self._source.randrange(len(layout))
        order, boundaries = layout[k]
        if not boundaries:
            return None
        j, b = self._source.randrange(len(order)), self._source.randrange(len(boundaries))
        return _with(layout, k, Pipeline((*order[:j], *order[j + 1 :]), (*boundaries[:b], *boundaries[b + 1 :])))

    def _insert(self, layout: Layout) -> Layout | None:
        """An idle device takes part of a replica."""
        idle, k = self._idle(layout), self._source.randrange(len(layout))
        order, boundaries = layout[k]
        free = sorted({*self._places} - {*boundaries})
        if not idle or not free:
            return None
        j = self._source.randrange(len(order) + 1)
        longer = (*order[:j], self._source.choice(idle), *order[j:])
        return _with(layout, k, Pipeline(longer, tuple(sorted((*boundaries, self._source.choice(free))))))

    def _pass_on(self, layout: Layout) -> Layout | None:
        """A device leaves one replica and enters another."""
        left = self._drop(layout)
        return None if left is None else self._insert(left)

    def _new_replica(self, layout: Layout) -> Layout | None:
        idle = self._idle(layout)
        return (*layout, Pipeline((self._source.choice(idle),), ())) if idle else None

    def _drop_replica(self, layout: Layout) -> Layout | None:
        k = self._source.randrange(len(layout))
        return (*layout[:k], *layout[k + 1 :]) if len(layout) > 1 else None

    def _idle(self, layout: Layout) -> list[str]:
        used = {name for pipeline in layout for name in pipeline.order}
        return [name for name in self._names if name not in used]


def _with(layout: Layout, k: int, pipeline: Pipeline) -> Layout:
    return (*layout[:k], pipeline, *layout[k + 1 :])


def annealed(problem: Problem, start: Layout, start_s: float, seconds: float) -> tuple[Layout, float, int]:
    """The best layout met, its step and the number of moves."""
    costs, source = Costs(problem), random.Random(0)
    moves, tried = Moves(problem, source), 0
    now, now_s = best, best_s = start, start_s
    begun = time.process_time()
    while seconds and (done := (time.process_time() - begun) / seconds) < 1:
        tried += 1
        offer = moves.neighbour(now)
        if offer is None:
            continue
        limit_s = now_s - start_s * HOT * (COLD / HOT) ** done * math.log(1 - source.random())
        offer_s = costs.step_s(offer)
        if offer_s <= limit_s:
            now, now_s = offer, offer_s
            if now_s < best_s:
                best, best_s = now, now_s
    return best, best_s, tried


def best_whole(problem: Problem) -> tuple[Layout, float]:
    """Of every set of devices, each with a replica: the fastest, and its step. Of more than so many devices the fastest
    are looked at."""
    costs = Costs(problem)
    by_speed = sorted(problem.fleet.devices, key=lambda device: -device.sustained_flops_per_s)
    fastest = [device.name for device in by_speed if costs.holds(device.name)][:MOST_WHOLE]
    alone = [Pipeline((name,), ()) for name in problem.fleet.names if name in fastest]
    most = min(len(alone), problem.micro_batches, problem.most_replicas)
    sets = (chosen for size in range(1, most + 1) for chosen in itertools.combinations(alone, size))
    found = ((chosen, costs.step_s(chosen)) for chosen in sets)
    return min(found, key=lambda one: one[1], default=((), math.inf))


def measured(seed: int, seconds: float) -> Row | None:
    """None where nothing fits."""
    problem = case(seed)
    judge, begun = partial(simulated_s, problem), time.process_time()
    try:
        plan = make_plan("auto", problem, judge)
    except FleetTooSmall:
        return None
    cpu_s = time.process_time() - begun
    start = tuple(Pipeline(x.order, x.boundaries) for x in layouts_of(plan))
    whole, whole_s = best_whole(problem)
    auto_s = judge(plan)
    start, start_s = min(((start, auto_s), (whole, whole_s)), key=lambda found: found[1])
    best, best_s, moves = annealed(problem, start, start_s, seconds)
    return Row(
        seed=seed,
        model=problem.flow.graph.name,
        cpu_s=cpu_s,
        devices=len(problem.fleet.names),
        micro_batches=problem.micro_batches,
        auto_s=auto_s,
        whole_s=whole_s if math.isfinite(whole_s) else None,
        annealed_s=best_s,
        auto_replicas=len(plan.replicas),
        annealed_replicas=len(best),
        moves=moves,
    )


def table(found: Rows) -> Table:
    drawn = Table("fleet", title=f"auto, and annealing from its plan for {found.seconds:g} CPU s")
    for heading in ("devices", "micro-batches", "auto", "whole replicas", "annealed", "gained", "replicas", "moves"):
        drawn.add_column(heading, justify="right")
    for row in found.rows:
        drawn.add_row(
            f"{row.seed} {row.model}",
            str(row.devices),
            str(row.micro_batches),
            f"{row.auto_s:.4f} s",
            "-" if row.whole_s is None else f"{row.whole_s:.4f} s",
            f"{row.annealed_s:.4f} s",
            f"{row.gained:.2%}",
            f"{row.auto_replicas} to {row.annealed_replicas}",
            f"{row.moves:,}",
        )
    over = [row.seed for row in found.rows if row.gained > MOST_GAINED]
    drawn.caption = f"{len(found.rows)} fleets; gained more than {MOST_GAINED:.0%} on {over or 'none'}"
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, f"{QUICK_FLEETS} fleets, {QUICK_SECONDS:g} s each")
    parser.add_argument("--seconds", type=float, default=None, metavar="S", help="CPU seconds of each; 60")
    parser.add_argument("--fleets", type=int, default=None, metavar="N", help="how many; 50")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first fleet; 0")
    options = parser.parse_args()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    fleets = options.fleets or (QUICK_FLEETS if options.quick else FLEETS)
    found = Rows(seconds=seconds, rows=())
    if options.json.exists():
        before = msgspec.json.decode(options.json.read_bytes(), type=Rows)
        found = before if before.seconds == seconds else found
    seed = max((row.seed for row in found.rows), default=options.first - 1)
    while len(found.rows) < fleets:
        seed += 1
        row = measured(seed, seconds)
        if row is not None:
            found = Rows(seconds=seconds, rows=(*found.rows, row))
            write_figures(options.json, found)
            print(f"{seed}: {row.gained:.2%}", file=sys.stderr)
    Console(width=140).print(table(found))
    return 0 if all(row.gained <= MOST_GAINED for row in found.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
