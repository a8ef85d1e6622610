"""Lower bounds on the price of a step, in the unit of the fleet's prices.

A device that is paid p per second and computes v FLOPs per second does no more than v T in a step of T seconds, so

    sum of p T  >=  n w * min(p / v)

for n micro-batches of w FLOPs, whatever the plan. A pipeline of S >= 2 devices also pays all of them while its first
micro-batch passes through, of which each computes its own part only: the S - 1 cheapest for no less than w / fastest.
Averaging keeps at least as many devices waiting as there are replicas. Egress is not counted: it can only add.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork, Floats, network_of
from isthmus.cost.price import SECONDS_PER_HOUR
from isthmus.errors import UserError
from isthmus.planners.bounds import step_certificate
from isthmus.planners.replica_bound import replicas_bound_s
from isthmus.plans import Certificate

MOST_SETS = 6
"""Devices up to which the bound on several replicas looks at every set."""


def cheapest_pipeline_bound(problem: Problem, network: FleetNetwork, blocks: Blocks) -> float:
    """Of one replica: the least over one device that holds the model, and over several."""
    rate, work, count = _rates(problem), float(blocks.work[-1]), problem.micro_batches
    need = sum(v.owned_bytes for v in blocks.variables) + float(blocks.saved[-1])
    alone = network.memory >= need
    per_flop = rate / network.speed
    single = count * work * float(per_flop[alone].min()) if alone.any() else float("inf")
    if len(rate) == 1 or blocks.count == 1:
        return single if np.isfinite(single) else 0.0
    fewest = 1 + int(np.searchsorted(np.cumsum(np.sort(network.memory)[::-1]), need))
    waiting = float(np.sort(rate)[: max(1, fewest - 1)].sum()) * work / float(network.speed.max())
    return min(single, count * work * float(per_flop.min()) + waiting)


def cheapest_replicas_bound(problem: Problem, network: FleetNetwork, blocks: Blocks, gradient_bytes: float) -> float:
    """Of two replicas and more; infinite where they do not fit."""
    names, rate = network.names, _rates(problem)
    if len(names) > MOST_SETS:
        averaging_s = replicas_bound_s(network, blocks, problem.micro_batches, gradient_bytes, problem.sync.period)
        if not np.isfinite(averaging_s):
            return averaging_s
        work = problem.micro_batches * float(blocks.work[-1])
        # Two devices at least are paid for as long as any plan of several replicas takes.
        return max(work * float((rate / network.speed).min()), float(np.sort(rate)[:2].sum()) * averaging_s)
    found = [float("inf")]
    for size in range(2, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            try:
                part = network_of(problem.on(problem.fleet.subset(names[d] for d in chosen)))
            except UserError:  # no data holder among them
                continue
            seconds = replicas_bound_s(part, blocks, problem.micro_batches, gradient_bytes, problem.sync.period)
            found.append(float(rate[list(chosen)].sum()) * seconds)
    return min(found)


def price_certificate(bound: float, price: float, question: str, *, exact: bool = False) -> Certificate | None:
    """What a lower bound on the price of a step proves; None for a bound of 0, which proves nothing."""
    certificate = step_certificate(bound, price, question, exact=exact)
    return None if certificate is None else msgspec.structs.replace(certificate, objective="cost")


def _rates(problem: Problem) -> Floats:
    """Per device, in money per second."""
    return np.array([device.price_per_hour for device in problem.fleet.devices]) / SECONDS_PER_HOUR
