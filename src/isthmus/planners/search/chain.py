"""One pipeline: the fastest, or the cheapest."""

from __future__ import annotations

from isthmus.cost import Problem
from isthmus.planners.search.cheapest import cheapest
from isthmus.planners.search.fastest import fastest
from isthmus.planners.search.feeding import fed
from isthmus.plans import Plan


def chain(problem: Problem) -> Plan:
    """The best choice, order and cuts of the devices: exact on small fleets, by local search over orders beyond.

    Raises FleetTooSmall with the device that is short, and by how much.
    """
    if problem.constraints.copied:
        return fed(problem)
    money = problem.constraints.objective == "cost" or problem.constraints.limited
    return cheapest(problem) if money else fastest(problem)
