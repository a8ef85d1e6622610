"""Which links a plan uses, and the longest message over each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from isthmus.cost.sync import messages
from isthmus.fleet import Fleet
from isthmus.plans import Plan


class UsedLink(NamedTuple):
    """A directed link that the plan uses, by worker id, and its longest message."""

    source: int
    target: int
    size_bytes: float
    seconds: float
    what: str


def link_uses_of(plan: Plan, fleet: Fleet, number: Mapping[str, int]) -> list[UsedLink]:
    """One per directed pair of slots, given each device's; of several messages the slowest."""
    found: dict[tuple[int, int], UsedLink] = {}

    def add(source: str, target: str, size_bytes: float, what: str) -> None:
        if not size_bytes or source == target or source not in number or target not in number:
            return
        pair = number[source], number[target]
        seconds = fleet.link(source, target).transfer_s(size_bytes)
        if pair not in found or seconds > found[pair].seconds:
            found[pair] = UsedLink(*pair, size_bytes, seconds, what)

    for replica in plan.replicas:
        names = [stage.device for stage in replica.workers]
        for edge in replica.worker_edges:
            add(names[edge.source], names[edge.target], edge.forward_bytes, "activations per micro-batch")
            add(names[edge.target], names[edge.source], edge.backward_bytes, "gradients per micro-batch")
        for shared, owner, user in replica.shared_uses:
            add(names[owner], names[user], shared.size_bytes, "a shared parameter per step")
            add(names[user], names[owner], shared.gradient_bytes, "a shared parameter's gradient per step")
    for group in plan.sync.groups:
        for a, b, size_bytes in itertools.chain.from_iterable(messages(group)):
            add(a, b, size_bytes, f"of {plan.sync.averages} that are summed")
    return list(found.values())
