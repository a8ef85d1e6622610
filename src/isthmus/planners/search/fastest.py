"""The fastest chain of stages, cut exactly.

Minimises the closed form of `cost.steptime` over the order and choice of devices and over the cuts. Up to six
devices it is exact; beyond, orders come from local search, cuts stay exact, and the certificate says how far a
lower bound is. FusionLLM's OP-Fence and Sky Computing's allocation solve the same problem by heuristics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import Blocks
from isthmus.cost.compression import packs_alike
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.even import even
from isthmus.planners.bounds import pooled_bound_s, step_certificate
from isthmus.planners.observer import keep, looked_at
from isthmus.planners.search.exhaustive_pipelines import exhaustive_pipeline
from isthmus.planners.search.greedy_fill import greedy_fill, stage_bytes
from isthmus.planners.search.order_search import FoundOrder, OrderSearch
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.planners.search.threshold_search import TOLERANCE
from isthmus.planners.surrogates import over_surrogates
from isthmus.plans import Plan

QUESTION = "the time of a step of any plan of one replica: any devices in any order, any cuts, by the closed form"


def fastest(problem: Problem, *, settle: bool = True) -> Plan:
    """The fastest pipeline, whatever the problem's objective, with its certificate.

    Without `settle` it does not try every pipeline where memory throttles them, and proves less. Raises FleetTooSmall
    with the device that is short, and by how much.
    """
    looked_at(0)
    problem = problem.timed()
    network, blocks = network_of(problem), Blocks(problem)
    if not packs_alike(problem):
        return _packed(problem, network, blocks, settle)
    near = pruned_fleet(problem, network, blocks)
    if near is not problem:
        plan = fastest(near, settle=False)
        moved = build_plan(problem, [s.device for s in plan.stages], plan.boundaries(), planner="chain")
        return _certified(problem, moved, pooled_bound_s(network, blocks, problem.micro_batches))
    classic = OrderSearch(problem, network, blocks)
    best = classic.run() if classic.exhaustive or problem.schedule == "gpipe" else None
    plans = _plans(problem, [best])
    closed_form_s = best.step_s if best else 0.0
    # Where memory throttles the pipeline, the closed form is not the whole story: search again with it in mind, and
    # for stages that recompute.
    throttled = problem.schedule != "gpipe" and not any(
        p.predicted.step_s <= closed_form_s * (1 + TOLERANCE) for p in plans
    )
    if throttled:
        plans += _plans(problem, [OrderSearch(problem, network, blocks, throttled=True).run()])
    if problem.recompute and (throttled or not plans):
        plans += _plans(problem, [OrderSearch(problem, network, blocks.recomputing()).run()])
    plans += _baseline(problem)
    tight = throttled or _memory_binds(problem, network, blocks)
    if classic.exhaustive and ((tight and settle) or problem.constraints.labels_stay):
        known_s = min((p.predicted.step_s for p in plans), default=float("inf"))
        proven = exhaustive_pipeline(problem, network, blocks, known_s)
        if proven is not None and (proven.plan or plans):
            chosen = proven.plan or min(plans, key=lambda p: p.predicted.step_s)
            return _certified(problem, chosen, proven.bound)
    if not plans:  # raises unless a placement was missed
        fallback = greedy_fill(problem, network, blocks)
        plans = _plans(problem, [FoundOrder(fallback.devices, tuple(blocks.boundaries(fallback.cut)), 0.0, 0.0)])
    chosen = min(plans, key=lambda p: p.predicted.step_s)
    if best and classic.exhaustive and not tight:
        return _certified(problem, chosen, best.bound_s)
    return _certified(problem, chosen, pooled_bound_s(network, blocks, problem.micro_batches))


def _packed(problem: Problem, network: FleetNetwork, blocks: Blocks, settle: bool) -> Plan:
    """Where what a message takes depends on the plan."""
    best = over_surrogates(problem, partial(fastest, settle=False))
    plans = [best, *_baseline(problem)]
    best = min(plans, key=lambda p: p.predicted.step_s)
    if settle and OrderSearch(problem, network, blocks).exhaustive:
        proven = exhaustive_pipeline(problem, network, blocks, best.predicted.step_s)
        if proven is not None:
            return _certified(problem, proven.plan or best, proven.bound)
    return _certified(problem, best, pooled_bound_s(network, blocks, problem.micro_batches))


def _memory_binds(problem: Problem, network: FleetNetwork, blocks: Blocks) -> bool:
    """Whether some device could not hold the whole model with the micro-batches of the classic schedule."""
    most = problem.micro_batches
    held = most if problem.schedule == "gpipe" else min(most, len(network.names) + problem.constraints.labels_stay)
    return stage_bytes(blocks, 0, blocks.count, held) > float(network.memory.min())


def _plans(problem: Problem, found: Sequence[FoundOrder | None]) -> list[Plan]:
    names = problem.fleet.names
    plans: list[Plan] = []
    for f in filter(None, found):
        with contextlib.suppress(FleetTooSmall):  # two stages may each fit the device that they share
            plan = build_plan(problem, [names[d] for d in f.devices], f.boundaries, planner="chain")
            plans.append(keep(plan))
    return plans


def _baseline(problem: Problem) -> list[Plan]:
    try:
        return [keep(even(problem))]
    except FleetTooSmall:
        return []


def _certified(problem: Problem, plan: Plan, bound_s: float) -> Plan:
    """The same layout with its certificate, and with the reason why devices are left out."""
    certificate = step_certificate(bound_s, plan.predicted.step_s, QUESTION)
    order = [stage.device for stage in plan.stages]
    proven = certificate is not None and not certificate.gap
    reason = "no plan is faster with it" if proven else "no plan that was found is faster with it"
    return build_plan(
        problem,
        order,
        plan.boundaries(),
        planner="chain",
        certificate=certificate,
        notes={name: reason for name in problem.fleet.names if name not in order},
    )
