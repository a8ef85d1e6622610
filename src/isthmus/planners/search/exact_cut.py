"""The exact cost of a pipeline, and the exact search where values skip stages.

A value goes directly from the stage that made it to every stage that takes it, so what a stage costs depends on
who holds each live value. That holder list is the label of a search state. For a plain chain it is always
"the stage before"; with skip connections few labels are within reach of the best plan known, because the
relaxation bounds what is still to be paid.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from isthmus.cost.blocks import Blocks
from isthmus.cost.network import FleetNetwork
from isthmus.planners.observer import looked_at
from isthmus.planners.relaxation import Path, Relaxation

Label = tuple[int, ...]
"""The device that holds each item of `Blocks.live[boundary]`, in that order."""


class Cost(NamedTuple):
    sum_s: float
    """fill + shared."""
    bottleneck_s: float
    shared_s: float = 0.0
    """The part of the sum that is paid once per step."""


class SearchTooLarge(Exception):
    """The search gave up after its budget of states."""


class Best(NamedTuple):
    cost: Cost
    path: Path


def stage_cost(blocks: Blocks, network: FleetNetwork, label: Label, start: int, end: int, device: int) -> Cost:
    """What the stage [start, end) on `device` adds to the sum, and the longest it keeps itself or a link busy."""
    total = bottleneck = float(blocks.work[end] - blocks.work[start]) / float(network.speed[device])
    messages, shared = received(blocks, network, label, start, end, device)
    for holder, (forward, backward) in messages.items():
        total += network.message_s(holder, device, forward) + network.message_s(device, holder, backward)
        wires = forward * network.byte_s[holder, device], backward * network.byte_s[device, holder]
        bottleneck = max(bottleneck, float(wires[0]), float(wires[1]))
    return Cost(total + shared, bottleneck, shared)


def received(
    blocks: Blocks, network: FleetNetwork, label: Label, start: int, end: int, device: int
) -> tuple[dict[int, list[int]], float]:
    """Bytes that a stage exchanges with each holder, forward and backward, and the seconds of shared parameters."""
    messages: dict[int, list[int]] = {}
    shared = 0.0
    for (number, use), holder in zip(blocks.live[start], label, strict=True):
        if use >= end:
            continue
        item = blocks.items[number]
        if item.per_step:
            shared += network.message_s(holder, device, item.forward_bytes)
            shared += network.message_s(device, holder, item.backward_bytes)
        else:
            message = messages.setdefault(holder, [0, 0])
            message[0] += item.forward_bytes
            message[1] += item.backward_bytes
    return messages, shared


def next_label(blocks: Blocks, label: Label, start: int, end: int, device: int) -> Label:
    held = {number: holder for (number, _), holder in zip(blocks.live[start], label, strict=True)}
    return tuple(held.get(number, device) for number, _ in blocks.live[end])


def path_cost(blocks: Blocks, network: FleetNetwork, path: Path) -> Cost:
    """The closed form of a whole pipeline: (fill + shared, period, shared)."""
    stages = stage_costs(blocks, network, path)
    slowest_s = max(c.bottleneck_s for c in stages)
    if len(set(path.devices)) < len(path.devices):
        slowest_s = max(slowest_s, _twice_used_s(blocks, network, path))
    return Cost(sum(c.sum_s for c in stages), slowest_s, sum(c.shared_s for c in stages))


def _twice_used_s(blocks: Blocks, network: FleetNetwork, path: Path) -> float:
    """The longest that a device or a directed link is busy, where two stages may share it."""
    busy: dict[tuple[int, int], float] = {}

    def add(source: int, target: int, seconds: float) -> None:
        busy[source, target] = busy.get((source, target), 0.0) + seconds

    label: Label = ()
    for device, (start, end) in _stages(blocks, path):
        add(device, device, float(blocks.work[end] - blocks.work[start]) / float(network.speed[device]))
        for holder, (forward, backward) in received(blocks, network, label, start, end, device)[0].items():
            if holder != device:
                add(holder, device, forward * float(network.byte_s[holder, device]))
                add(device, holder, backward * float(network.byte_s[device, holder]))
        label = next_label(blocks, label, start, end, device)
    return max(busy.values())


def stage_costs(blocks: Blocks, network: FleetNetwork, path: Path) -> list[Cost]:
    label: Label = ()
    found: list[Cost] = []
    for device, (start, end) in _stages(blocks, path):
        found.append(stage_cost(blocks, network, label, start, end, device))
        label = next_label(blocks, label, start, end, device)
    return found


def _stages(blocks: Blocks, path: Path) -> list[tuple[int, tuple[int, int]]]:
    return list(zip(path.devices, itertools.pairwise((0, *path.cut, blocks.count)), strict=True))


def objective(relaxation: Relaxation, path: Path) -> Cost:
    """What the relaxation bounds: the closed form, or the throttled one, whose sum leaves shared parameters out."""
    if not relaxation.throttled:
        return path_cost(relaxation.tables.blocks, relaxation.network, path)
    blocks, network = relaxation.tables.blocks, relaxation.network
    cost = path_cost(blocks, network, path)
    bottleneck, round_trip_s = cost.bottleneck_s, 0.0
    pairs = zip(_stages(blocks, path), stage_costs(blocks, network, path), strict=True)
    for (device, (start, end)), stage in reversed(list(pairs)):
        compute_s = float(blocks.work[end] - blocks.work[start]) / float(network.speed[device])
        bottleneck = max(bottleneck, relaxation.throttle_s(device, start, end, round_trip_s + compute_s))
        round_trip_s += stage.sum_s - stage.shared_s
    return Cost(cost.sum_s - cost.shared_s, bottleneck, cost.shared_s)


class _Reached(NamedTuple):
    cost: Cost
    before: _Reached | None
    device: int
    boundary: int


def least_sum(relaxation: Relaxation, threshold_s: float, cutoff_s: float, most_states: int) -> tuple[Best | None, int]:
    """The least sum below `cutoff_s` with a bottleneck up to `threshold_s`, and how many states were expanded.

    None where no pipeline is below. The relaxation must hold the bounds of this threshold or of a larger one.
    Raises SearchTooLarge beyond `most_states`.
    """
    blocks, network, routes = relaxation.tables.blocks, relaxation.network, relaxation.routes
    reached: list[dict[tuple[int, Label], _Reached]] = [{} for _ in routes.states]
    for root in routes.roots:
        reached[root][0, ()] = _Reached(Cost(0.0, 0.0), None, -1, 0)
    best: _Reached | None = None
    expanded = 0
    for number, steps in enumerate(routes.steps):
        for (start, label), entry in reached[number].items():
            if start == blocks.count:
                if routes.may_end(number) and entry.cost.sum_s < cutoff_s:
                    best, cutoff_s = entry, entry.cost.sum_s
                continue
            expanded += 1
            if expanded > most_states:
                raise SearchTooLarge
            looked_at()
            for device, after in steps:
                bounds = relaxation.row(number, device, after, start) + entry.cost.sum_s
                for offset in np.flatnonzero(bounds < cutoff_s):
                    end = start + int(offset) + 1
                    step = stage_cost(blocks, network, label, start, end, device)
                    cost = Cost(entry.cost.sum_s + step.sum_s, max(entry.cost.bottleneck_s, step.bottleneck_s))
                    to_go = float(relaxation.values[after][end])
                    if step.bottleneck_s > threshold_s or cost.sum_s + to_go >= cutoff_s:
                        continue
                    key = (end, next_label(blocks, label, start, end, device))
                    known = reached[after].get(key)
                    if known is None or cost.sum_s < known.cost.sum_s:
                        reached[after][key] = _Reached(cost, entry, device, end)
    return (Best(best.cost, _path(best)) if best else None), expanded


def _path(entry: _Reached) -> Path:
    devices: list[int] = []
    cut: list[int] = []
    while entry.before is not None:
        devices.append(entry.device)
        cut.append(entry.boundary)
        entry = entry.before
    return Path(tuple(reversed(devices)), tuple(reversed(cut[1:])))
