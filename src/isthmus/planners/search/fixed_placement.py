"""Where the terms of a problem let a pipeline begin and end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.cost import Problem
from isthmus.cost.network import FleetNetwork

MOST_BEGINNINGS = 3  # data holders that each order of a large fleet is tried from

Order = tuple[int, ...]


@dataclass(frozen=True)
class FixedPlacement:
    """`holders` are all devices where the data are everywhere."""

    holders: tuple[int, ...]
    labels_stay: bool = False
    """The last stage is on a holder too, which may be that of the first stage: a device that comes twice."""

    def may_end(self, device: int) -> bool:
        return not self.labels_stay or device in self.holders

    def pipelines(self, devices: Sequence[int], count: int) -> Iterator[Order]:
        """Every order of `count` stages on some of the devices."""
        for order in itertools.permutations(devices, count):
            if order[0] in self.holders and self.may_end(order[-1]):
                yield order
        if self.labels_stay and count > 2:
            for order in itertools.permutations(devices, count - 1):
                if order[0] in self.holders:
                    yield (*order, order[0])

    def applied(self, order: Order) -> Iterator[Order]:
        """The order with a data holder in front, and one at the end where labels stay; as it is where neither binds."""
        beginnings = [device for device in order if device in self.holders][:MOST_BEGINNINGS]
        if not beginnings:  # the order has left them out
            beginnings = list(self.holders[:MOST_BEGINNINGS])
        if not self.labels_stay and set(order) <= set(self.holders):
            beginnings = [order[0]]
        for first in beginnings:
            rest = tuple(device for device in order if device != first)
            if not self.labels_stay:
                yield (first, *rest)
                continue
            if rest:
                yield (first, *rest, first)
            others = [device for device in rest if device in self.holders]
            yield (first, *(d for d in rest if d != others[-1]), others[-1]) if others else (first,)

    def dealt(self, orders: Sequence[Order]) -> tuple[Order, ...]:
        """The orders, where one without a data holder swaps its first device for a holder that another can spare."""
        found = [list(order) for order in orders]
        for order in found:
            if not set(order) & set(self.holders):
                giver = max(found, key=lambda other: len(set(other) & set(self.holders)))
                spare = [k for k, device in enumerate(giver) if device in self.holders]
                if len(spare) > 1:
                    order[0], giver[spare[-1]] = giver[spare[-1]], order[0]
        return tuple(map(tuple, found))


def fixed_placement_of(problem: Problem, network: FleetNetwork) -> FixedPlacement:
    constraints = problem.constraints
    holders = tuple(
        k for k, name in enumerate(network.names) if not constraints.data_holders or name in constraints.data_holders
    )
    return FixedPlacement(holders, constraints.labels_stay)
