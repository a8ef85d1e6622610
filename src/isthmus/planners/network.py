"""The fleet as arrays, for planners that look at every pair of devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.cost import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Network:
    """Devices by number, in fleet order. The diagonals of the link matrices are zero."""

    names: tuple[str, ...]
    speed: Floats
    """FLOP/s, scaled by lambda."""
    memory: Floats
    """Bytes."""
    latency: Floats
    """[source, target] seconds."""
    byte_s: Floats
    """[source, target] seconds per byte: 1 / bandwidth."""

    def message_s(self, source: int, target: int, size_bytes: float) -> float:
        return float(self.latency[source, target] + size_bytes * self.byte_s[source, target]) if size_bytes else 0.0

    def interchangeable(self, a: int, b: int) -> bool:
        """Whether swapping two devices changes nothing."""
        if self.speed[a] != self.speed[b] or self.memory[a] != self.memory[b]:
            return False
        swap = np.arange(len(self.names))
        swap[[a, b]] = b, a
        return all(np.array_equal(m, m[np.ix_(swap, swap)]) for m in (self.latency, self.byte_s))


def network_of(problem: Problem) -> Network:
    fleet = problem.fleet
    count = len(fleet.devices)
    latency, byte_s = np.zeros((count, count)), np.zeros((count, count))
    for i, source in enumerate(fleet.names):
        for j, target in enumerate(fleet.names):
            if i != j:
                link = fleet.link(source, target)
                latency[i, j], byte_s[i, j] = link.latency_s, 1.0 / link.bandwidth_bytes_per_s
    return Network(
        names=fleet.names,
        speed=np.array([problem.speed(d) for d in fleet.devices]),
        memory=np.array([float(d.memory_bytes) for d in fleet.devices]),
        latency=latency,
        byte_s=byte_s,
    )
