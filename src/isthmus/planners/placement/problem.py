"""DT-FM's placement problem: which device runs which stage of which replica, so that messages take least time.

Devices that the network cannot tell apart are one *kind*, so ten thousand devices in forty regions are two 40 x 40
matrices. A network where every link differs has as many kinds as devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from isthmus.cost.kernel import Floats, Ints
from isthmus.cost.network import link_kinds
from isthmus.errors import UserError
from isthmus.fleet import Fleet


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementTask:
    """The problem of a placement: `stages` x `replicas` tasklets and their messages.

    DT-FM's D_pp, D_dp, c_pp and c_dp (sec. 2). Raises UserError for a number out of range.
    """

    stages: int
    replicas: int
    activation_bytes: float  # bytes of one micro-batch, between neighbouring stages, one way (c_pp)
    parameter_bytes: float  # bytes of one stage (c_dp)

    def __post_init__(self) -> None:
        for field, number in (("stages", self.stages), ("replicas", self.replicas)):
            if number < 1:
                raise UserError(f"task: {field}: got {number}, expected at least 1")
        for field in ("activation_bytes", "parameter_bytes"):
            number = float(getattr(self, field))
            if not 0 <= number < np.inf:
                raise UserError(f"task: {field}: got {number}, expected a finite number of at least 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """A task and as many devices as it has tasklets. Make one with `from_fleet` or `from_matrices`.

    Both matrices may be asymmetric; costs use the mean of both directions (DT-FM sec. 2, communication graph G).
    """

    task: PlacementTask
    kind: Ints  # [devices]: the row of each device in the matrices below
    latency_s: Floats
    """[kinds, kinds]: from a device of one kind to a device of another; the diagonal joins two devices of one kind."""
    bandwidth_bytes_per_s: Floats  # [kinds, kinds], above 0

    def __post_init__(self) -> None:
        devices, kinds = len(self.kind), int(self.kind.max(initial=-1)) + 1
        if devices != self.task.stages * self.task.replicas:
            expected = f"{self.task.stages} stages x {self.task.replicas} replicas"
            raise UserError(f"placement: devices: got {devices}, expected {expected}")
        _check_matrix("latency_s", self.latency_s, kinds, above_zero=False)
        _check_matrix("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, kinds, above_zero=True)

    @cached_property
    def kind_sizes(self) -> Ints:
        return np.bincount(self.kind, minlength=len(self.latency_s))

    @cached_property
    def sync_s(self) -> Floats:
        """[kinds, kinds]: a term of Eq. 2, 2 (alpha + c_dp / (D_dp beta)), in seconds."""
        return self._link_s(self.task.parameter_bytes / self.task.replicas)

    @cached_property
    def hop_s(self) -> Floats:
        """[kinds, kinds]: a term of Eq. 3, 2 (alpha + c_pp / beta), in seconds; infinite where no two devices exist."""
        hop = self._link_s(self.task.activation_bytes)
        np.fill_diagonal(hop, np.where(self.kind_sizes > 1, hop.diagonal(), np.inf))
        return hop

    def between_devices(self) -> tuple[Floats, Floats]:
        """`sync_s` with a diagonal of 0 and `hop_s` with an infinite one, [devices, devices] each."""
        places = np.ix_(self.kind, self.kind)
        sync_s, hop_s = self.sync_s[places], self.hop_s[places]
        np.fill_diagonal(sync_s, 0.0)
        np.fill_diagonal(hop_s, np.inf)
        return sync_s, hop_s

    def _link_s(self, size_bytes: float) -> Floats:
        latency = (self.latency_s + self.latency_s.T) / 2
        bandwidth = (self.bandwidth_bytes_per_s + self.bandwidth_bytes_per_s.T) / 2
        return 2 * (latency + size_bytes / bandwidth)


def from_matrices(task: PlacementTask, latency_s: ArrayLike, bandwidth_bytes_per_s: ArrayLike) -> PlacementProblem:
    """The problem on a network given as [devices, devices] matrices, whose diagonals are ignored.

    Devices that can be exchanged without changing a symmetrised link become one kind. Raises UserError for a bad shape
    or number.
    """
    latency, bandwidth = np.array(latency_s, dtype=np.float64), np.array(bandwidth_bytes_per_s, dtype=np.float64)
    devices = len(latency)
    for field, matrix, filler in (("latency_s", latency, 0.0), ("bandwidth_bytes_per_s", bandwidth, 1.0)):
        if matrix.shape != (devices, devices):
            raise UserError(f"placement: {field}: got shape {matrix.shape}, expected {(devices, devices)}")
        np.fill_diagonal(matrix, filler)
    _check_matrix("latency_s", latency, devices, above_zero=False)
    _check_matrix("bandwidth_bytes_per_s", bandwidth, devices, above_zero=True)
    means = (latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2
    kind, first, second = _twins(*means)
    return PlacementProblem(
        task=task,
        kind=kind,
        latency_s=_between_kinds(means[0], first, second),
        bandwidth_bytes_per_s=_between_kinds(means[1], first, second),
    )


def from_fleet(fleet: Fleet, task: PlacementTask) -> PlacementProblem:
    """The problem on a fleet, devices numbered in its order.

    A region is one kind; a device that the fleet's links name is a kind of its own. So a fleet costs kinds squared.
    The devices' speeds do not count, as in the paper. Raises UserError where the number of devices does not fit.
    """
    kind, latency, bandwidth = link_kinds(fleet)
    alone = bandwidth == 0
    latency[alone], bandwidth[alone] = 0.0, 1.0
    return PlacementProblem(task=task, kind=kind, latency_s=latency, bandwidth_bytes_per_s=bandwidth)


def _twins(latency: Floats, bandwidth: Floats) -> tuple[Ints, Ints, Ints]:
    """Kind of each device, and per kind its first and its last member.

    Two devices are twins if their links to all others are equal.
    """
    members: list[list[int]] = []
    kind = np.zeros(len(latency), dtype=np.int64)
    for device in range(len(latency)):
        found = (k for k, twins in enumerate(members) if _same_links(latency, bandwidth, twins[0], device))
        kind[device] = next(found, len(members))
        if kind[device] == len(members):
            members.append([])
        members[kind[device]].append(device)
    return kind, np.array([twins[0] for twins in members]), np.array([twins[-1] for twins in members])


def _same_links(latency: Floats, bandwidth: Floats, a: int, b: int) -> bool:
    differs = (latency[a] != latency[b]) | (bandwidth[a] != bandwidth[b])
    differs[[a, b]] = False
    return not differs.any()


def _between_kinds(matrix: Floats, first: Ints, second: Ints) -> Floats:
    between = matrix[np.ix_(first, first)]
    np.fill_diagonal(between, matrix[first, second])
    return between


def _check_matrix(field: str, matrix: Floats, size: int, *, above_zero: bool) -> None:
    if matrix.shape != (size, size):
        raise UserError(f"placement: {field}: got shape {matrix.shape}, expected {(size, size)}")
    good = np.isfinite(matrix) & ((matrix > 0) if above_zero else (matrix >= 0))
    if not good.all():
        row, column = np.argwhere(~good)[0]
        expected = f"a finite number {'above' if above_zero else 'of at least'} 0"
        raise UserError(f"placement: {field}[{row}, {column}]: got {matrix[row, column]}, expected {expected}")
