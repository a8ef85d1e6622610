"""Lower bounds of all plans that a planner has without a search, and the certificates that state them.

`verification` has a bound that sees links, cuts and sums too, and shares no code with planners. Bounds range over any
number of replicas, whatever planner made the plan: the same plan of the same problem has the same certificate.

A micro-batch of w FLOPs, n of them in a step, R replicas, devices of v FLOPs per second that are paid p per second:

    step of R replicas  >=  w / max v + (n - R) * max(w / sum of v, largest block / (R * max v)) + averaging
    averaging           >=  two rounds; and 2 (R - 1) times the gradients, over all N (N - 1) links at best
    price of a plan     >=  n * w * min over devices (p / v)
    of one pipeline     >=  that, and the cheapest devices while its first micro-batch passes through others
    of several          >=  p of each device of a set, for as long as replicas on it take

Memory says how many stages there are at least. Egress is not counted: it can only add.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from isthmus.cost import Problem, is_priced, minimised
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.errors import UserError
from isthmus.planners.search.cuts import TOLERANCE
from isthmus.plans import Certificate, Plan, question_in_words

MOST_SETS = 6  # devices up to which the price of several replicas is bounded for every set


class LeastBound(NamedTuple):
    """A lower bound of what every plan of a problem takes, and whether the bound is attained."""

    bound: float  # seconds or money per step, by the problem's objective; infinite where no plan fits
    exact: bool  # whether some plan attains it


def pipeline_bound(problem: Problem, network: FleetNetwork, blocks: Blocks) -> float:
    """Return the bound of one replica, in seconds or money by the objective; a limit on the other can only add."""
    bound = pipeline_price if problem.constraints.objective == "cost" else pipeline_step_s
    return bound(network, blocks, problem.micro_batches)


def pipeline_step_s(network: FleetNetwork, blocks: Blocks, micro_batches: int) -> float:
    work, fastest = float(blocks.work[-1]), float(network.speed.max())
    period_s = max(work / float(network.speed.sum()), _largest_block(blocks) / fastest)
    return work / fastest + (micro_batches - 1) * period_s


def replicas_step_s(network: FleetNetwork, blocks: Blocks, micro_batches: int, period: int = 1) -> float:
    """The least over several replicas that average once in a period, in seconds; infinite where not even two fit."""
    devices, need = len(network.names), _need_bytes(blocks)
    most = min(devices, micro_batches, int(network.memory.sum() // need) if need else devices)
    if most < 2 or _fewest_stages(network, blocks) > blocks.count:
        return float("inf")
    count = np.arange(2, most + 1)
    work, fastest = float(blocks.work[-1]), float(network.speed.max())
    period_s = np.maximum(work / float(network.speed.sum()), _largest_block(blocks) / fastest / count)
    gradient_bytes = float(sum(variable.gradient_bytes for variable in blocks.variables))
    link_s = 2 * (count - 1) * gradient_bytes / (devices * (devices - 1)) * float(network.kind_byte_s.min())
    rounds_s = 2 * float(network.kind_latency.min()) if gradient_bytes else 0.0
    step_s = work / fastest + (micro_batches - count) * period_s + np.maximum(rounds_s, link_s) / period
    return float(step_s.min())


def pipeline_price(network: FleetNetwork, blocks: Blocks, micro_batches: int) -> float:
    """Return the bound of one replica: the least over one device that holds the model, and over several."""
    rate, work = network.rate, float(blocks.work[-1])
    per_flop, alone = rate / network.speed, network.memory >= _need_bytes(blocks)
    single = micro_batches * work * float(per_flop[alone].min()) if alone.any() else float("inf")
    if len(rate) == 1 or blocks.count == 1:
        return single if np.isfinite(single) else 0.0
    others = max(1, _fewest_stages(network, blocks) - 1)
    waiting = float(np.sort(rate)[:others].sum()) * work / float(network.speed.max())
    return min(single, micro_batches * work * float(per_flop.min()) + waiting)


def replicas_price(problem: Problem, network: FleetNetwork, blocks: Blocks) -> float:
    """Return the bound of two or more replicas; infinite where they do not fit."""
    names, rate, count, period = network.names, network.rate, problem.micro_batches, problem.sync.every
    if len(names) > MOST_SETS:
        step_s = replicas_step_s(network, blocks, count, period)
        if not np.isfinite(step_s):
            return step_s
        work = count * float(blocks.work[-1])
        return max(work * float((rate / network.speed).min()), float(np.sort(rate)[:2].sum()) * step_s)
    found = [float("inf")]
    for size in range(2, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            try:
                part = network_of(problem.on(problem.fleet.subset(names[d] for d in chosen)))
            except UserError:  # no data holder among them
                continue
            found.append(float(rate[list(chosen)].sum()) * replicas_step_s(part, blocks, count, period))
    return min(found)


def _largest_block(blocks: Blocks) -> float:
    return float(np.diff(blocks.work).max(initial=0.0))


def _need_bytes(blocks: Blocks) -> float:
    """Return the bytes of the whole model with one micro-batch."""
    return sum(variable.owned_bytes for variable in blocks.variables) + float(blocks.saved[-1])


def _fewest_stages(network: FleetNetwork, blocks: Blocks) -> int:
    """So many of the largest devices hold the model."""
    return 1 + int(np.searchsorted(np.cumsum(np.sort(network.memory)[::-1]), _need_bytes(blocks)))


def settles(problem: Problem) -> bool:
    """Return whether every plan may be tried: time alone counts, nothing has a limit, the data are everywhere, and
    gradients are summed in every step."""
    constraints = problem.constraints
    free = not constraints.limited and not constraints.data_holders and problem.schedule != "delayed"
    return constraints.objective == "time" and free and problem.sync.mode == "every-step"


def relaxed(problem: Problem, network: FleetNetwork, blocks: Blocks, single: Plan | None) -> LeastBound:
    """The lesser of a bound on one replica, for which that of `chain`'s plan counts if given, and on several."""
    proven = single.certificate if single is not None else None
    alone, replicated = pipeline_bound(problem, network, blocks), float("inf")
    if problem.most_replicas > 1 and problem.constraints.objective == "cost":
        replicated = replicas_price(problem, network, blocks)
    elif problem.most_replicas > 1:
        replicated = replicas_step_s(network, blocks, problem.micro_batches, problem.sync.every)
    if proven is not None:
        alone = proven.lower_bound if proven.exact else max(alone, proven.lower_bound)
    return LeastBound(min(alone, replicated), exact=proven is not None and proven.exact and alone <= replicated)


def question(problem: Problem, counts: Sequence[int] = ()) -> str:
    """Describe the plans that `least` bounds, over these numbers of micro-batches, by default the problem's own."""
    return question_in_words(
        problem.constraints,
        counts or (problem.micro_batches,),
        priced=prices(problem),
        period=problem.sync.every,
        recompute=problem.recompute,
    )


def with_certificate(problem: Problem, plan: Plan, found: LeastBound, counts: Sequence[int] = ()) -> Plan:
    """The plan with what the bound proves of it. `problem` has the plan's number of micro-batches; `counts` are those
    over which the bound ranges."""
    priced = prices(problem)
    reached = minimised(problem.unlimited("cost" if priced else "time"), plan)
    certificate = certificate_of(found.bound, reached, question(problem, counts), exact=found.exact, priced=priced)
    return msgspec.structs.replace(plan, certificate=certificate)


def stated(problem: Problem, certificate: Certificate | None) -> LeastBound | None:
    """The bound in a certificate, if it answers the problem's question."""
    if certificate is None or certificate.question != question(problem):
        return None
    return LeastBound(certificate.lower_bound, certificate.exact)


def prices(problem: Problem) -> bool:
    """On a fleet where nothing has a price the fastest plan is sought, and time is bounded."""
    return problem.constraints.objective == "cost" and is_priced(problem.fleet)


def of_fed(plan: Plan) -> LeastBound:
    """Return the bound where several holders feed one chain: there are no plans of several replicas."""
    proven = plan.certificate
    return LeastBound(proven.lower_bound, proven.exact) if proven is not None else LeastBound(0.0, exact=False)


def certificate_of(bound: float, reached: float, question: str, *, exact: bool, priced: bool) -> Certificate | None:
    """Return the certificate of a lower bound on a plan's step, or on its price; None for 0, which proves nothing."""
    if bound <= 0:
        return None
    bound = min(bound, reached)
    gap = reached / bound - 1
    none = gap <= 10 * TOLERANCE
    proven = Certificate(lower_bound=bound, gap=0.0 if none else gap, question=question, exact=exact or none)
    return msgspec.structs.replace(proven, objective="cost") if priced else proven
