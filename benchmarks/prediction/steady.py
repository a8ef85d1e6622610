"""The step that a plan states, and the recurrence by which planners rank plans, against a long simulation.

`python benchmarks/prediction/steady.py [--quick] [--plans N] [--json PATH]`

Fleets of 2 to 32 devices as in `benchmarks/auto`; models made by hand, and captured ones: GPT and Llama with the output
layer tied and not, a U-Net, a ResNet and two towers. Planners take turns, the slow ones on small fleets only. One plan
in five has schedule `zero-bubble` or `delayed`, which no recurrence knows: these are ranked by the formula.

What a plan states (`predicted.steady_s`) is a simulation of a few steps. It is compared with the slope of step ends in
one of 40 steps. Ends with 1 where the median error is above 0.1 %, or one is above 1 %.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from isthmus.api.make_plan import stated_steps, step_in_simulation
from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.cut_table import cut_table
from isthmus.cost.network import network_of
from isthmus.cost.pipelines import Trials, stage_tasks
from isthmus.cost.steady import steady_step_s
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan, Replica
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate
from isthmus.trace import step_bounds

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))
from captured import captured, with_model
from cases import case_of

from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "steady.json"
PLANS, QUICK_PLANS = 400, 24
PLANNERS = ("chain", "even", "op-fence", "equal-compute", "sky-heuristic", "random", "auto")
SLOW = {"sky-optimal": 4, "dtfm-genetic": 6, "dtfm-genetic-code": 6, "dtfm-kl": 6}  # devices up to which each is asked
BY_FORMULA = ("zero-bubble", "delayed")
LONG, LONG_OVERLAPPING = 24, 150  # steps of a long simulation; of `delayed`, whose steps settle late and alternate
LONGEST_S = 5e4  # that a long simulation may last by the formula: the simulator ends at twice as much
MEDIAN_LIMIT, WORST_LIMIT = 0.001, 0.01


class Row(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    planner: str
    devices: int
    replicas: int
    schedule: str
    alike: bool  # whether a pipeline has devices of one speed, whose tasks may end at the same time
    uplinks: bool
    ranked_s: float  # by the recurrence, or the formula
    stated_s: float  # by the plan
    simulated_s: float  # for long

    @property
    def error(self) -> float:
        """Of what the plan states."""
        return abs(self.stated_s / self.simulated_s - 1)

    @property
    def ranked_error(self) -> float:
        return abs(self.ranked_s / self.simulated_s - 1)

    @property
    def kind(self) -> str:
        if self.schedule in BY_FORMULA:
            return f"{self.schedule}, ranked by the formula"
        if self.uplinks:
            return "shared uplinks"
        if self.replicas > 1:
            return "several replicas"
        return "one pipeline, equal devices" if self.alike else "one pipeline"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    median_error: float
    worst_error: float
    median_ranked: float  # error of the recurrence, where it knows the schedule
    worst_ranked: float
    rows: list[Row]


MODELS = ("by hand", "by hand", "gpt", "tied gpt", "llama", "tied llama", "unet", "resnet", "towers")


def drawn(seed: int) -> tuple[str, Problem]:
    source = random.Random(f"steady {seed}")
    name, devices = source.choice(MODELS), round(2 * 16 ** source.random())
    problem = case_of(source, devices, source.choice((8, 16, 32)), f"steady-{seed}")
    return name, problem if name == "by hand" else with_model(problem, captured(name))


def ranked_s(problem: Problem, plan: Plan) -> float:
    """The slowest replica's steady step, and what averaging takes; the formula's step where no recurrence knows the
    schedule."""
    if problem.schedule in BY_FORMULA:
        return plan.predicted.step_s
    return max(_of_replica(problem, replica) for replica in plan.replicas) + plan.predicted.sync_s


def _of_replica(problem: Problem, replica: Replica) -> float:
    starts = [stage.first for stage in replica.stages[1:]]
    blocks = Blocks(problem, starts)
    number = {name: d for d, name in enumerate(problem.fleet.names)}
    order = np.array([[number[stage.device] for stage in replica.stages]])
    trials = Trials(cut_table(blocks, np.arange(blocks.count + 1)[None, :]), np.zeros(1, dtype=np.int64), order)
    again = np.array([[stage.recompute for stage in replica.stages]])
    tasks = stage_tasks(problem, network_of(problem), trials, replica.micro_batches, again)
    return steady_step_s(tasks, 0, replica.micro_batches)


def rows() -> Iterator[Row]:
    for seed in itertools.count():
        name, problem = drawn(seed)
        slow = [planner for planner, most in SLOW.items() if len(problem.fleet.names) <= most]
        planners = (*PLANNERS, *slow)
        planner = planners[seed % len(planners)]
        if seed % 5 == 4:
            problem = replace(problem, schedule=BY_FORMULA[seed % 2])
        try:
            plan = make_plan(planner, problem)
        except UserError:  # it does not fit
            continue
        if (LONG_OVERLAPPING if problem.schedule == "delayed" else LONG) * plan.predicted.step_s > LONGEST_S:
            continue
        speeds = [[problem.fleet.device(stage.device).flops_per_s for stage in r.stages] for r in plan.replicas]
        yield Row(
            model=name,
            planner=planner,
            devices=len(problem.fleet.names),
            replicas=len(plan.replicas),
            schedule=problem.schedule,
            alike=any(len(set(found)) < len(found) for found in speeds),
            uplinks=any(site.uplink_bytes_per_s is not None for site in problem.fleet.region_info),
            ranked_s=ranked_s(problem, plan),
            stated_s=step_in_simulation(plan, problem.fleet, stated_steps(plan), SimulationOptions()),
            simulated_s=long_s(plan, problem.fleet),
        )


def long_s(plan: Plan, fleet: Fleet) -> float:
    """Seconds from the end of one step to that of the next, without the first third and the last one."""
    steps = LONG_OVERLAPPING if plan.replicas[0].schedule.name == "delayed" else LONG
    spec = RunSpec(steps=steps, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
    ends = [end_s for _, (_, end_s) in sorted(step_bounds(simulate(plan, fleet, spec)).items())][steps // 3 : -1]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def table(found: list[Row]) -> Table:
    made = Table("plans", "number", "stated: median", "largest", "ranked: median", "within 1 %", "largest")
    kinds = sorted({row.kind for row in found})
    for kind, some in ((kind, [r for r in found if r.kind == kind]) for kind in kinds):
        stated, ranked = [r.error for r in some], [r.ranked_error for r in some]
        within = f"{sum(e <= WORST_LIMIT for e in ranked) / len(ranked):.0%}"
        figures = (statistics.median(stated), max(stated), statistics.median(ranked), max(ranked))
        texts = [f"{figure:.3%}" for figure in figures]
        made.add_row(kind, str(len(some)), *texts[:3], within, texts[3])
    return made


def main() -> int:
    parser = options_of(__doc__, LATEST, f"{QUICK_PLANS} plans")
    parser.add_argument("--plans", type=int, default=None, metavar="N", help="how many; 400")
    options = parser.parse_args()
    found = list(itertools.islice(rows(), options.plans or (QUICK_PLANS if options.quick else PLANS)))
    errors = [row.error for row in found]
    ranked = [row.ranked_error for row in found if row.schedule not in BY_FORMULA]
    report = Report(
        host=machine(),
        median_error=statistics.median(errors),
        worst_error=max(errors),
        median_ranked=statistics.median(ranked),
        worst_ranked=max(ranked),
        rows=found,
    )
    write_figures(options.json, report)
    Console(width=130).print(table(found))
    print(f"stated: median {report.median_error:.3%}, largest {report.worst_error:.2%}")
    print(f"recurrence: median {report.median_ranked:.3%}, largest {report.worst_ranked:.2%}")
    return 0 if report.median_error <= MEDIAN_LIMIT and report.worst_error <= WORST_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
