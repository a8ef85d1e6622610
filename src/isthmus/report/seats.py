"""Who sits where in a picture of a plan, and which links between them the plan uses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.colors import LinearSegmentedColormap

from isthmus.cost.sync import messages
from isthmus.fleet import Fleet
from isthmus.plans import Plan

MOST_DEVICES = 96
"""Beyond this a cell would be smaller than a frame: the devices in use are drawn first, and the rest is counted."""
RECOMPUTES = "*"
"""Behind the number of a stage that runs its forward twice."""
_IDLE = "#D9D9D9"
_STAGES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00")
"""Okabe and Ito's; beyond them, stages are shades from light to dark."""


class Seat(NamedTuple):
    """A device on both axes."""

    device: str
    label: str
    colour: str


class Use(NamedTuple):
    """A directed link that the plan uses, by seat, and its longest message."""

    source: int
    target: int
    size_bytes: float
    seconds: float
    what: str


def seats_of(plan: Plan, fleet: Fleet) -> tuple[list[Seat], int]:
    """The devices drawn, and how many are not."""
    found: dict[str, Seat] = {}
    for number, replica in enumerate(plan.replicas):
        colours = _stage_colours(len(replica.stages))
        for index, stage in zip(replica.stage_of, replica.workers, strict=True):
            label = str(index) if len(plan.replicas) == 1 else f"{number}.{index}"
            label += RECOMPUTES if stage.recompute else ""
            before = found.get(fleet.device(stage.device).name)
            if before is not None:  # a device of two stages has the colour of the first
                label = f"{before.label}+{label}"
            found[stage.device] = Seat(stage.device, label, before.colour if before else colours[index])
    idle = [Seat(name, "", _IDLE) for name in fleet.names if name not in found]
    seats = [*found.values(), *idle]
    return seats[:MOST_DEVICES], max(0, len(seats) - MOST_DEVICES)


def _stage_colours(count: int) -> list[str]:
    if count <= len(_STAGES):
        return list(_STAGES[:count])
    shades = LinearSegmentedColormap.from_list("stages", ["#F0E442", "#E69F00", "#CC79A7", "#0072B2", "#003B4F"])
    return ["#{:02x}{:02x}{:02x}".format(*(round(255 * c) for c in shades(k / (count - 1))[:3])) for k in range(count)]


def uses_of(plan: Plan, fleet: Fleet, number: Mapping[str, int]) -> list[Use]:
    """One per directed pair of seats, given each device's; of several messages the slowest."""
    found: dict[tuple[int, int], Use] = {}

    def add(source: str, target: str, size_bytes: float, what: str) -> None:
        if not size_bytes or source == target or source not in number or target not in number:
            return
        pair = number[source], number[target]
        seconds = fleet.link(source, target).transfer_s(size_bytes)
        if pair not in found or seconds > found[pair].seconds:
            found[pair] = Use(*pair, size_bytes, seconds, what)

    for replica in plan.replicas:
        names = [stage.device for stage in replica.workers]
        for edge in replica.worker_edges:
            add(names[edge.source], names[edge.target], edge.forward_bytes, "activations per micro-batch")
            add(names[edge.target], names[edge.source], edge.backward_bytes, "gradients per micro-batch")
        for shared, lender, borrower in replica.lent:
            add(names[lender], names[borrower], shared.size_bytes, "a shared parameter per step")
            add(names[borrower], names[lender], shared.size_bytes, "a shared parameter's gradient per step")
    for group in plan.sync.groups:
        for a, b, size_bytes in itertools.chain.from_iterable(messages(group)):
            add(a, b, size_bytes, f"of {plan.sync.averages} that are summed")
    return list(found.values())
