"""Sky Computing's layer allocation: a chain of layers cut into runs, each on one device, the largest workload least.

Reading of the communication latency `ct`: the paper's workload (its section IV-D) adds `ct` for every layer, while the
public programme of its optimal allocation leaves it out. A message crosses where a device starts, so here a
device that has layers pays `ct` once, and the bytes of the one boundary that it receives over. `sky_heuristic` keeps
the literal form to steer by; every result is judged by `LayerProblem.workload_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isthmus.cost.kernel import Floats, Ints
from isthmus.errors import FleetTooSmall, UserError
from isthmus.units import format_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """The bytes that a device receives before its first layer, while it computes, and the bandwidth of the link."""

    boundary_bytes: Floats  # [layers]: bytes that enter layer j where a device starts with it
    device_s_per_byte: Floats  # [devices]: seconds per byte of the link that a device receives over


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProblem:
    """Layers in their order, devices in any. Raises UserError for a wrong shape or a number out of range.

    Sky Computing, section IV-C: lf_j, lm_j, dt_i, m_i and ct_i are the first five fields.
    """

    layer_flops: Floats  # [layers]: forward and backward
    layer_memory_bytes: Floats  # [layers]: peak while training
    device_s_per_flop: Floats  # [devices]
    device_memory_bytes: Floats  # [devices]
    device_latency_s: Floats  # [devices]: paid once by a device that has layers
    transfers: Transfers | None = None
    memory_reach: Ints | None = None
    """[devices, layers]: the furthest end of a run that starts at layer j and fits the device, where memory is not a
    sum over layers. Replaces both memory fields, which then only serve for messages."""

    def __post_init__(self) -> None:
        layers, devices = len(self.layer_flops), len(self.device_s_per_flop)
        _check("layer_flops", self.layer_flops, (layers,))
        _check("layer_memory_bytes", self.layer_memory_bytes, (layers,))
        _check("device_s_per_flop", self.device_s_per_flop, (devices,), above_zero=True)
        _check("device_memory_bytes", self.device_memory_bytes, (devices,))
        _check("device_latency_s", self.device_latency_s, (devices,))
        if self.transfers is not None:
            _check("transfers.boundary_bytes", self.transfers.boundary_bytes, (layers,))
            _check("transfers.device_s_per_byte", self.transfers.device_s_per_byte, (devices,))
        if self.memory_reach is not None:
            _check("memory_reach", self.memory_reach, (devices, layers))
            if self.memory_reach.max() > layers:
                raise UserError(f"memory_reach: got {self.memory_reach.max()}, expected at most {layers} layers")

    @property
    def layers(self) -> int:
        return len(self.layer_flops)

    @property
    def devices(self) -> int:
        return len(self.device_s_per_flop)

    @cached_property
    def flops_before(self) -> Floats:
        """[layers + 1]: FLOPs of the first k layers."""
        return np.concatenate(([0.0], np.cumsum(self.layer_flops)))

    @cached_property
    def memory_before(self) -> Floats:
        return np.concatenate(([0.0], np.cumsum(self.layer_memory_bytes)))

    @cached_property
    def _memory_lists(self) -> tuple[list[float], list[float]]:
        return self.memory_before.tolist(), self.device_memory_bytes.tolist()

    def received_s(self, device: int | Ints, start: int | Ints) -> Floats:
        """Latency and transfer of a run that starts at layer `start`; numpy broadcasts the two."""
        latency = self.device_latency_s[device]
        if self.transfers is None:
            return np.broadcast_to(latency, np.broadcast_shapes(np.shape(device), np.shape(start)))
        return latency + self.transfers.device_s_per_byte[device] * self.transfers.boundary_bytes[start]

    def workload_s(self, device: int | Ints, start: int | Ints, end: int | Ints) -> Floats:
        """Seconds of the layers start .. end - 1 on a device; numpy broadcasts the three. Nothing where empty.

        With transfers the longer of the two counts, else latency is added.
        """
        compute = self.device_s_per_flop[device] * (self.flops_before[end] - self.flops_before[start])
        received = self.received_s(device, np.minimum(start, self.layers - 1))
        both = compute + received if self.transfers is None else np.maximum(compute, received)
        return np.where(np.greater(end, start), both, 0.0)

    def memory_end(self, device: int | Ints, start: int | Ints) -> Ints:
        """The furthest end of a run from `start` that the device's memory holds; numpy broadcasts the two."""
        if self.memory_reach is not None:
            return self.memory_reach[device, start]
        holds = self.memory_before[start] + self.device_memory_bytes[device]
        # Sums of bytes are exact to 2^53; a relative 1e-12 keeps a device that is filled to the last byte.
        return np.searchsorted(self.memory_before, holds * (1 + 1e-12), side="right") - 1

    @cached_property
    def received_table_s(self) -> Floats:
        """[devices, layers]: `received_s` of every start."""
        return self.received_s(np.arange(self.devices)[:, None], np.arange(self.layers)[None, :])

    @cached_property
    def memory_end_table(self) -> Ints:
        """[devices, layers]: `memory_end` of every start."""
        return self.memory_end(np.arange(self.devices)[:, None], np.arange(self.layers)[None, :])

    def fits(self, device: int, start: int, end: int) -> bool:
        """`memory_end` for one run, without numpy's overhead."""
        if end <= start:
            return True
        if self.memory_reach is not None:
            return bool(end <= self.memory_reach[device, start])
        need, has = self._memory_lists
        return need[end] <= (need[start] + has[device]) * (1 + 1e-12)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The layers of each device."""

    order: tuple[int, ...]  # devices that have layers, by number, in pipeline order
    counts: tuple[int, ...]  # layers of each of them
    workload_s: float  # the largest of any device
    lower_bound_s: float = 0.0
    """No allocation, in whatever order of devices, has a smaller largest workload; 0 where nothing was proven."""

    @property
    def gap(self) -> float:
        """(workload - lower bound) / lower bound; infinite where nothing was proven."""
        if self.lower_bound_s <= 0:
            return 0.0 if self.workload_s <= 0 else math.inf
        return max(0.0, self.workload_s / self.lower_bound_s - 1)


def allocation(problem: LayerProblem, order: Sequence[int], counts: Sequence[int], bound_s: float = 0.0) -> Allocation:
    """Layers dealt out in this order, devices with none left out.

    Raises UserError where the counts are not those of a whole chain, and FleetTooSmall where a device is too small.
    """
    if len(order) != len(counts) or sum(counts) != problem.layers or min(counts, default=0) < 0:
        raise UserError(f"allocation: got {len(order)} devices with {sum(counts)} layers, expected {problem.layers}")
    devices, lengths = np.array(order, dtype=np.int64), np.array(counts, dtype=np.int64)
    devices, lengths = devices[lengths > 0], lengths[lengths > 0]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    over = np.flatnonzero(problem.memory_end(devices, starts) < ends)
    if len(over):
        raise too_small(problem, int(devices[over[0]]), int(starts[over[0]]), int(ends[over[0]]))
    workload_s = float(problem.workload_s(devices, starts, ends).max())
    return Allocation(
        order=tuple(devices.tolist()),
        counts=tuple(lengths.tolist()),
        workload_s=workload_s,
        lower_bound_s=min(bound_s, workload_s),
    )


class RunTooLarge(FleetTooSmall):
    """A run of layers that a device cannot hold."""

    def __init__(self, message: str, device: int, start: int, end: int) -> None:
        super().__init__(message)
        self.device, self.start, self.end = device, start, end


def too_small(problem: LayerProblem, device: int, start: int, end: int) -> RunTooLarge:
    need = float(problem.memory_before[end] - problem.memory_before[start])
    has = float(problem.device_memory_bytes[device])
    refusal = f"device {device} cannot hold layers {start}..{end - 1}"
    if problem.memory_reach is not None:  # there what a run needs is not known in bytes
        return RunTooLarge(refusal, device, start, end)
    return RunTooLarge(
        f"{refusal}: they need {format_size(math.ceil(need))}, it has {format_size(math.floor(has))}: "
        f"{format_size(math.ceil(need - has))} short",
        device,
        start,
        end,
    )


def _check(name: str, values: Floats | Ints, shape: tuple[int, ...], *, above_zero: bool = False) -> None:
    if values.shape != shape or 0 in shape:
        raise UserError(f"{name}: got shape {values.shape}, expected {shape} with at least one entry")
    low = float(values.min())
    if not np.isfinite(values).all() or low < 0 or (above_zero and low == 0):
        expected = "above 0" if above_zero else "from 0"
        raise UserError(f"{name}: got {low} .. {values.max()}, expected finite numbers {expected}")
