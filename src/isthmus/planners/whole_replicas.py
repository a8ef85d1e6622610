"""The rest of a plan of several replicas when devices are lost, which can go on at once.

The replicas whose devices are all there keep their cuts, so no weight moves and nothing is searched: a plan for an
emergency. The lost ones' micro-batches are dealt to them in the proportions that they had.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from isthmus.cost import Problem, build_again, layouts_of
from isthmus.errors import FleetTooSmall
from isthmus.planners.registry import scheduled
from isthmus.plans import Plan


def whole_replicas(problem: Problem, plan: Plan, devices: Collection[str]) -> Plan | None:
    """The plan's replicas that run on these devices alone; None where there is none, or one has no room for more."""
    kept = [(x, r) for x, r in zip(layouts_of(plan), plan.replicas, strict=True) if set(x.order) <= set(devices)]
    if not kept:
        return None
    counts = dealt(plan.micro_batches, [layout.micro_batches for layout, _ in kept])
    layouts = [layout._replace(micro_batches=count) for (layout, _), count in zip(kept, counts, strict=True)]
    try:
        again = build_again(problem, layouts, msgspec.structs.replace(plan, replicas=tuple(r for _, r in kept)))
    except FleetTooSmall:
        return None
    return scheduled(problem, again)


def dealt(total: int, shares: Sequence[int]) -> list[int]:
    """`total` in whole numbers, in the proportions of `shares` (largest remainders first). Where `total` is no less
    than their sum, nobody gets less than before."""
    whole = [total * share // sum(shares) for share in shares]
    rests = sorted(range(len(shares)), key=lambda k: (-(total * shares[k] % sum(shares)), k))
    for k in rests[: total - sum(whole)]:
        whole[k] += 1
    return whole
