"""Who sits where in a picture of a plan."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.colors import LinearSegmentedColormap

from isthmus.fleet import Fleet
from isthmus.plans import Plan

MOST_DEVICES = 96
"""Beyond this a cell would be smaller than a frame: the devices in use are drawn first, and the rest is counted."""
RECOMPUTES = "*"  # behind the number of a stage that runs its forward twice
_IDLE = "#D9D9D9"
_STAGES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00")
"""Okabe and Ito's; beyond them, stages are shades from light to dark."""


class PictureSlot(NamedTuple):
    """A device on both axes."""

    device: str
    label: str
    colour: str


def slots_of(plan: Plan, fleet: Fleet) -> tuple[list[PictureSlot], int]:
    """The devices drawn, and how many are not."""
    found: dict[str, PictureSlot] = {}
    for number, replica in enumerate(plan.replicas):
        colours = _stage_colours(len(replica.stages))
        for index, stage in zip(replica.stage_of, replica.workers, strict=True):
            label = str(index) if len(plan.replicas) == 1 else f"{number}.{index}"
            label += RECOMPUTES if stage.recompute else ""
            before = found.get(fleet.device(stage.device).name)
            if before is not None:  # a device of two stages has the colour of the first
                label = f"{before.label}+{label}"
            found[stage.device] = PictureSlot(stage.device, label, before.colour if before else colours[index])
    idle = [PictureSlot(name, "", _IDLE) for name in fleet.names if name not in found]
    slots = [*found.values(), *idle]
    return slots[:MOST_DEVICES], max(0, len(slots) - MOST_DEVICES)


def _stage_colours(count: int) -> list[str]:
    if count <= len(_STAGES):
        return list(_STAGES[:count])
    shades = LinearSegmentedColormap.from_list("stages", ["#F0E442", "#E69F00", "#CC79A7", "#0072B2", "#003B4F"])
    return ["#{:02x}{:02x}{:02x}".format(*(round(255 * c) for c in shades(k / (count - 1))[:3])) for k in range(count)]
