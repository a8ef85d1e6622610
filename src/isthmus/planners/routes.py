"""The orders of devices that a search ranges over, as a graph of states.

A state says all that the cost of the next stage may depend on: the first device, the last one, the set used so
far, and how many stages are still to come (1F1B holds that many micro-batches in flight). Ranging over every
order of every subset is Held and Karp's dynamic programme (1962); one fixed order is a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from isthmus.planners.network import Network

ANY = -1
"""`remaining` where memory does not bind, so that the number of stages to come does not matter."""


class State(NamedTuple):
    first: int
    last: int
    """-1 before the first stage."""
    used: int
    """Bit set of devices."""
    remaining: int


class Routes:
    """States in an order in which successors come later. `steps[k]` are the (device, state number) after state k."""

    def __init__(self, roots: Sequence[State], members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.states: list[State] = list(roots)
        self.steps: list[list[tuple[int, int]]] = []
        self.roots = range(len(roots))

    def may_end(self, number: int) -> bool:
        state = self.states[number]
        return state.remaining == 0 or (state.remaining == ANY and state.used != 0)


def one_order(order: Sequence[int]) -> Routes:
    """All devices of `order`, in this order."""
    routes = Routes([State(-1, -1, 0, len(order))], order)
    for position, device in enumerate(order):
        before = routes.states[-1]
        first = device if position == 0 else before.first
        routes.states.append(State(first, device, before.used | 1 << device, before.remaining - 1))
        routes.steps.append([(device, position + 1)])
    routes.steps.append([])
    return routes


def all_orders(network: Network, *, memory_binds: bool) -> Routes:
    """Every order of every subset; interchangeable devices are used lowest number first."""
    devices = range(len(network.names))
    sizes = range(1, len(devices) + 1) if memory_binds else [ANY]
    routes = Routes([State(-1, -1, 0, size) for size in sizes], devices)
    twins = [[j for j in range(i) if network.interchangeable(i, j)] for i in devices]
    number = {state: k for k, state in enumerate(routes.states)}
    for state in routes.states:  # grows while it is read: breadth first
        routes.steps.append([])
        for device in _next_devices(state, devices, twins):
            first = device if state.used == 0 else state.first
            remaining = ANY if state.remaining == ANY else state.remaining - 1
            after = State(first, device, state.used | 1 << device, remaining)
            if after not in number:
                number[after] = len(routes.states)
                routes.states.append(after)
            routes.steps[-1].append((device, number[after]))
    return routes


def _next_devices(state: State, devices: Iterable[int], twins: Sequence[Sequence[int]]) -> list[int]:
    if state.remaining == 0:
        return []
    return [
        d for d in devices
        if not state.used >> d & 1 and all(state.used >> twin & 1 for twin in twins[d])
    ]  # fmt: skip
