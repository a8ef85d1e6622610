"""A fleet that is no longer what it was stated to be: corrected by measurement, or changed on purpose in emulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from isthmus.errors import UserError
from isthmus.fleet.fleet import Fleet
from isthmus.fleet.links import Link, Route


class FleetChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From a step on, one device or one directed link of an emulated fleet is `factor` times as fast as stated.

    Raises `ValueError`, which a job file's reader turns into a `UserError` with its place, where it names both or
    neither, for a step below 0 and for a factor that is not above 0.
    """

    step: int  # The first step with the change.
    factor: float  # A factor on the device's FLOP/s or the link's bandwidth, as the fleet states them.
    device: str = ""  # A device of the fleet; or a link, in its place.
    link: tuple[str, str] | None = None  # From, to.

    def __post_init__(self) -> None:
        if bool(self.device) == (self.link is not None):
            raise ValueError(f"got device {self.device!r} and link {self.link}, expected one of the two")
        if self.step < 0:
            raise ValueError(f"step: got {self.step}, expected at least 0")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor: got {self.factor}, expected a finite number above 0")


def corrected(
    fleet: Fleet, flops_per_s: Mapping[str, float], bandwidth_bytes_per_s: Mapping[tuple[str, str], float]
) -> Fleet:
    """The fleet with these sustained speeds, by device, and these bandwidths, by source and target; all else as it was.

    Raises `UserError` for an unknown device.
    """
    for name in (*flops_per_s, *(name for pair in bandwidth_bytes_per_s for name in pair)):
        fleet.device(name)
    devices = tuple(
        msgspec.structs.replace(d, scale=flops_per_s[d.name] / d.flops_per_s) if d.name in flops_per_s else d
        for d in fleet.devices
    )
    kept = [r for r in fleet.links.devices if (r.source, r.target) not in bandwidth_bytes_per_s]
    restated = [
        Route(source, target, Link(fleet.link(source, target).latency_s, bandwidth))
        for (source, target), bandwidth in bandwidth_bytes_per_s.items()
    ]
    links = msgspec.structs.replace(fleet.links, devices=(*kept, *restated))
    return msgspec.structs.replace(fleet, devices=devices, links=links)


def in_half(fleet: Fleet) -> Fleet:
    """The fleet as it is for a job that computes in bf16 or fp16: devices whose speed in these is known have it."""
    devices = tuple(
        msgspec.structs.replace(d, scale=d.half_flops_per_s / d.flops_per_s, half_flops_per_s=0.0)
        if d.half_flops_per_s
        else d
        for d in fleet.devices
    )
    return msgspec.structs.replace(fleet, devices=devices)


def with_memory(fleet: Fleet, memory_bytes: Mapping[str, int]) -> Fleet:
    """The fleet with this memory, by device, where it is less than stated. Devices that it does not have are ignored:
    they may have been left out of it."""
    devices = tuple(
        msgspec.structs.replace(d, memory_bytes=min(d.memory_bytes, memory_bytes.get(d.name, d.memory_bytes)))
        for d in fleet.devices
    )
    return msgspec.structs.replace(fleet, devices=devices)


def changed(fleet: Fleet, changes: Iterable[FleetChange], step: int) -> Fleet:
    """The fleet as it is in a step. Of several changes to one thing the latest counts."""
    speeds: dict[str, float] = {}
    bandwidths: dict[tuple[str, str], float] = {}
    for change in sorted((c for c in changes if c.step <= step), key=lambda c: c.step):
        if change.link is None:
            speeds[change.device] = fleet.device(change.device).sustained_flops_per_s * change.factor
        else:
            bandwidths[change.link] = fleet.link(*change.link).bandwidth_bytes_per_s * change.factor
    return corrected(fleet, speeds, bandwidths)


LEAST_LATENCY_S = 1e-6
MOST_BANDWIDTH = 1e12  # bytes per second: what cannot be distinguished from no time at all


def fit_link(times: Sequence[tuple[int, float]]) -> Link:
    """The link of FusionLLM's T(M) = alpha + beta M, from round trips (size_bytes there and next to nothing back,
    seconds): those take 2 alpha + beta M, if both directions have the same latency.

    Of each size the lower quartile counts: what else a machine or a line does makes a trip longer, never shorter. Sizes
    are weighted by 1 / T, so that small ones tell the latency and large ones the bandwidth.
    UserError for fewer than two sizes.
    """
    by_size: dict[int, list[float]] = {}
    for size_bytes, seconds in times:
        by_size.setdefault(size_bytes, []).append(seconds)
    if len(by_size) < 2:
        raise UserError(f"link probe: got times of {len(by_size)} sizes, expected two or more")
    sizes = np.array(sorted(by_size), dtype=np.float64)
    usual_s = np.array([float(np.quantile(by_size[int(size)], 0.25)) for size in sizes])
    columns = np.stack([np.ones_like(sizes), sizes], axis=1)
    (intercept_s, slope), *_ = np.linalg.lstsq(columns / usual_s[:, None], np.ones_like(usual_s), rcond=None)
    return Link(max(float(intercept_s) / 2, LEAST_LATENCY_S), min(1 / max(float(slope), 1e-30), MOST_BANDWIDTH))
