"""DT-FM's placement as planners: equal stages, equal replicas, every device in one of them.

In DT-FM the numbers of stages and replicas are given; here every factorisation of the number of devices is tried, with
the model cut into stages of about equal FLOPs, and the plan whose closed form is best is kept. What the paper assumes
stays: devices count as equal, whatever their speed, and each has the same share of the batch. Each planner raises
FleetTooSmall where no number of stages fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from isthmus.cost import PlanLayout, Problem, build_replicas
from isthmus.cost.blocks import Blocks
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners.observer import keep
from isthmus.planners.placement import PLACEMENTS, PlacementProblem, PlacementTask, StageGrouping, from_fleet
from isthmus.plans import Plan

Search = Callable[[PlacementProblem, int], StageGrouping]
SEED = 0


def dtfm_genetic(problem: Problem) -> Plan:
    """DT-FM's hybrid genetic search over equal stages and replicas, with its fastest-link local search."""
    return _planned(problem, "dtfm-genetic")


def dtfm_genetic_code(problem: Problem) -> Plan:
    """DT-FM's search as its authors' code makes it: a child that costs no more replaces a parent."""
    return _planned(problem, "dtfm-genetic-code")


def dtfm_kl(problem: Problem) -> Plan:
    """DT-FM's baseline: the genetic search with circular Kernighan-Lin moves."""
    return _planned(problem, "dtfm-kl")


def random(problem: Problem) -> Plan:
    """Equal stages and replicas on devices in random order (DT-FM's baseline without a scheduler)."""
    return _planned(problem, "random")


def _planned(problem: Problem, name: str) -> Plan:
    best: Plan | None = None
    refused: FleetTooSmall | None = None
    for layouts in _layouts(problem, PLACEMENTS[name]):
        try:
            plan = keep(build_replicas(problem, layouts, planner=name))
        except FleetTooSmall as error:
            refused = error
            continue
        if best is None or plan.predicted.step_s < best.predicted.step_s:
            best = plan
    if best is not None:
        return best
    why = f"; {problem.not_summed}" if problem.not_summed is not None else ""
    raise refused or UserError(
        f"planner {name!r}: {len(problem.fleet.names)} devices do not factor into stages and replicas for a model of "
        f"{Blocks(problem).count} parts and {problem.micro_batches} micro-batches{why}"
    )


def _layouts(problem: Problem, search: Search) -> Iterator[list[PlanLayout]]:
    """One placement for each number of stages that divides the number of devices."""
    blocks, devices = Blocks(problem), len(problem.fleet.names)
    for stages in range(1, min(devices, blocks.count) + 1):
        replicas = devices // stages
        if stages * replicas != devices or replicas > problem.most_replicas:
            continue
        yield equal_layouts(blocks, stages, search, SEED)


def equal_layouts(blocks: Blocks, stages: int, search: Search, seed: int) -> list[PlanLayout]:
    """Equal stages and replicas on all devices of the problem, where `search` puts them.

    Raises UserError where the devices do not make whole replicas of so many stages.
    """
    problem = blocks.problem
    replicas = len(problem.fleet.names) // stages
    cut = equal_cut(blocks, stages)
    found = search(from_fleet(problem.fleet, _task(blocks, cut, replicas)), seed)
    shares = [len(part) for part in np.array_split(np.arange(problem.micro_batches), replicas)]
    names = np.array(problem.fleet.names)[found.devices]
    return [
        PlanLayout(tuple(map(str, names[:, r])), tuple(blocks.boundaries(cut)), share) for r, share in enumerate(shares)
    ]


def equal_cut(blocks: Blocks, stages: int) -> list[int]:
    """Block boundaries nearest to equal shares of the FLOPs, each stage one block at least."""
    wanted = blocks.work[-1] * np.arange(1, stages) / stages
    cut = np.abs(blocks.work[:, None] - wanted).argmin(axis=0).tolist()
    for k in range(len(cut)):
        low = cut[k - 1] + 1 if k else 1
        cut[k] = min(max(cut[k], low), blocks.count - (len(cut) - k))
    return cut


def _task(blocks: Blocks, cut: list[int], replicas: int) -> PlacementTask:
    """The largest message and the largest stage stand for all, as the paper's c_pp and c_dp.

    The paper's micro-batch is a replica's whole share of the batch (sec. 2: there are D_dp of them). Ours are parts of
    it, and all of them cross an edge in a step.
    """
    ends, share = [0, *cut, blocks.count], blocks.problem.micro_batches / replicas
    return PlacementTask(
        stages=len(cut) + 1,
        replicas=replicas,
        activation_bytes=share * max((blocks.live_bytes[boundary] / 2 for boundary in cut), default=0.0),
        parameter_bytes=float(max(_gradient_bytes(blocks, a, b) for a, b in pairwise(ends))),
    )


def _gradient_bytes(blocks: Blocks, start: int, end: int) -> int:
    return sum(v.gradient_bytes for v in blocks.variables if start <= v.uses[0] < end)
