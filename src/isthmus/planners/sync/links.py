"""Profiles for a fleet that was not measured: FLOPs over speed, and DT-FM's sharded parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.planners.sync.problem import WorkerProfile


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The work of one layer on a worker's share of the batch, and the bytes of its parameters."""

    name: str
    flops_forward: float
    flops_backward: float
    size_bytes: float


def profiles_on_fleet(fleet: Fleet, layers: Sequence[LayerWork]) -> tuple[WorkerProfile, ...]:
    """One profile per device of the fleet, all of them holding the whole model.

    A layer of c bytes is averaged over n devices in n shards. Device d sends every other one its shard, and gets its
    average back: sum over d' of (latency + c / n / bandwidth) in both directions (DT-FM, Eq. 2, where the two are
    equal). Raises UserError for a fleet of one device.
    """
    count = len(fleet.names)
    if count < 2:
        raise UserError(f"fleet {fleet.name!r}: got 1 device, expected at least 2 to average over")
    sizes = np.array([layer.size_bytes for layer in layers], dtype=np.float64)
    found: list[WorkerProfile] = []
    for device in fleet.devices:
        others = [name for name in fleet.names if name != device.name]
        links = [fleet.link(*pair) for o in others for pair in ((device.name, o), (o, device.name))]
        latency_s = sum(link.latency_s for link in links)
        byte_s = sum(1 / link.bandwidth_bytes_per_s for link in links) / count
        average_s = np.where(sizes > 0, latency_s + sizes * byte_s, 0.0)
        found.append(
            WorkerProfile(
                worker=device.name,
                forward_s=tuple(layer.flops_forward / device.sustained_flops_per_s for layer in layers),
                backward_s=tuple(layer.flops_backward / device.sustained_flops_per_s for layer in layers),
                average_s=tuple(average_s.tolist()),
            )
        )
    return tuple(found)
