"""The orders of devices that a search ranges over, as a graph of states.

A state says all that the cost of the next stage may depend on: the first device, the last one, the set used so
far, and how many stages are still to come (1F1B holds that many micro-batches in flight). Ranging over every
order of every subset is Held and Karp's dynamic programme (1962); one fixed order is a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from isthmus.cost.network import FleetNetwork
from isthmus.planners.search.fixed_placement import FixedPlacement

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

    def __init__(
        self, roots: Sequence[State], members: Iterable[int], fixed_placement: FixedPlacement | None = None
    ) -> None:
        """`fixed_placement` are None where the order itself keeps to them."""
        self.members = tuple(dict.fromkeys(members))
        self.returns = False
        """Whether a last stage may be on the device of the first."""
        self._fixed_placement = fixed_placement
        self.states: list[State] = list(roots)
        self.steps: list[list[tuple[int, int]]] = []
        self.roots = range(len(roots))

    def may_end(self, number: int) -> bool:
        state = self.states[number]
        if self._fixed_placement is not None and not self._fixed_placement.may_end(state.last):
            return False
        return state.remaining == 0 or (state.remaining == ANY and state.used != 0)


def one_order(order: Sequence[int]) -> Routes:
    """All devices of `order`, in this order; the first may come again at the end."""
    routes = Routes([State(-1, -1, 0, len(order))], order)
    routes.returns = len(order) > 1 and order[0] == order[-1]
    for position, device in enumerate(order):
        before = routes.states[-1]
        first = device if position == 0 else before.first
        routes.states.append(State(first, device, before.used | 1 << device, before.remaining - 1))
        routes.steps.append([(device, position + 1)])
    routes.steps.append([])
    return routes


def all_orders(network: FleetNetwork, fixed_placement: FixedPlacement, *, memory_binds: bool) -> Routes:
    """Every order of every subset; interchangeable devices are used lowest number first."""
    devices = range(len(network.names))
    sizes = range(1, len(devices) + 1 + fixed_placement.labels_stay) if memory_binds else [ANY]
    routes = Routes([State(-1, -1, 0, size) for size in sizes], devices, fixed_placement)
    routes.returns = fixed_placement.labels_stay
    twins = [[j for j in range(i) if fixed_placement.alike(i, j) and network.interchangeable(i, j)] for i in devices]
    number = {state: k for k, state in enumerate(routes.states)}
    for state in routes.states:  # grows while it is read: breadth first
        routes.steps.append([])
        for device in _next_devices(
            state, devices if state.used else fixed_placement.holders, twins, returns=routes.returns
        ):
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
