"""The orders of devices that a search ranges over: where a problem's terms let them begin and end, and their states.

A state says all that the cost of the next stage may depend on: the first device, the last one, the set used so
far, and how many stages are still to come (1F1B holds that many micro-batches in flight). Ranging over every
order of every subset is Held and Karp's dynamic programme (1962); one fixed order is a path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    def alike(self, a: int, b: int) -> bool:
        return (a in self.holders) == (b in self.holders)

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


ANY = -1  # `remaining` where memory does not bind, so that the number of stages to come does not matter


class State(NamedTuple):
    first: int
    last: int  # -1 before the first stage
    used: int  # bit set of devices
    remaining: int


class Routes:
    """States in an order in which successors come later. `steps[k]` are the (device, state number) after state k."""

    def __init__(
        self, roots: Sequence[State], members: Iterable[int], fixed: FixedPlacement | None = None, *, returns: bool
    ) -> None:
        """`fixed` is None where the order keeps to the terms. `returns`: the last stage may be on the first device."""
        self.members = tuple(dict.fromkeys(members))
        self.returns = returns
        self._fixed = fixed
        self.states: list[State] = list(roots)
        self.steps: list[list[tuple[int, int]]] = []
        self.roots = range(len(roots))

    def may_end(self, number: int) -> bool:
        state = self.states[number]
        if self._fixed is not None and not self._fixed.may_end(state.last):
            return False
        return state.remaining == 0 or (state.remaining == ANY and state.used != 0)


def one_order(order: Sequence[int]) -> Routes:
    """All devices of `order`, in this order; the first may come again at the end."""
    returns = len(order) > 1 and order[0] == order[-1]
    routes = Routes([State(-1, -1, 0, len(order))], order, returns=returns)
    for position, device in enumerate(order):
        before = routes.states[-1]
        first = device if position == 0 else before.first
        routes.states.append(State(first, device, before.used | 1 << device, before.remaining - 1))
        routes.steps.append([(device, position + 1)])
    routes.steps.append([])
    return routes


def all_orders(network: FleetNetwork, fixed: FixedPlacement, *, memory_binds: bool) -> Routes:
    """Every order of every subset; interchangeable devices are used lowest number first."""
    devices = range(len(network.names))
    sizes = range(1, len(devices) + 1 + fixed.labels_stay) if memory_binds else [ANY]
    routes = Routes([State(-1, -1, 0, size) for size in sizes], devices, fixed, returns=fixed.labels_stay)
    twins = [[j for j in range(i) if fixed.alike(i, j) and network.interchangeable(i, j)] for i in devices]
    number = {state: k for k, state in enumerate(routes.states)}
    for state in routes.states:  # grows while it is read: breadth first
        routes.steps.append([])
        free = devices if state.used else fixed.holders
        for device in _next_devices(state, free, twins, returns=routes.returns):
            first = device if state.used == 0 else state.first
            remaining = ANY if state.remaining == ANY else state.remaining - 1
            after = State(first, device, state.used | 1 << device, remaining)
            if device == state.first:  # back at the device of the first stage: nothing follows
                after = after._replace(remaining=0)
            if after not in number:
                number[after] = len(routes.states)
                routes.states.append(after)
            routes.steps[-1].append((device, number[after]))
    return routes


def _next_devices(state: State, devices: Iterable[int], twins: Sequence[Sequence[int]], *, returns: bool) -> list[int]:
    if state.remaining == 0:
        return []
    found = [d for d in devices if not state.used >> d & 1 and all(state.used >> twin & 1 for twin in twins[d])]
    may_return = returns and state.last != state.first and state.remaining in (ANY, 1)
    return [*found, state.first] if may_return else found
