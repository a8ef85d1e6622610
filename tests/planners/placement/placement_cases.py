"""Small random placement problems, and DT-FM's cost written out term by term."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from isthmus.planners.placement import PlacementProblem, PlacementTask, from_matrices

Groups = list[tuple[int, ...]]


def random_problem(
    seed: int, stages: int, replicas: int, *, sites: int = 0
) -> tuple[PlacementProblem, np.ndarray, np.ndarray]:
    """A problem and its [devices, devices] latency and bandwidth, asymmetric. Without sites every link differs."""
    rng = np.random.default_rng(seed)
    devices = stages * replicas
    site = rng.integers(sites, size=devices) if sites else np.arange(devices)
    size = sites or devices
    latency = rng.integers(0, 6, size=(size, size)).astype(float)[np.ix_(site, site)]
    bandwidth = rng.choice([1.0, 2.0, 4.0, 8.0], size=(size, size))[np.ix_(site, site)]
    task = PlacementTask(
        stages=stages,
        replicas=replicas,
        activation_bytes=float(rng.integers(0, 9)),
        parameter_bytes=float(rng.integers(0, 9)),
    )
    return from_matrices(task, latency, bandwidth), latency, bandwidth


def literal_cost_s(problem: PlacementProblem, latency: np.ndarray, bandwidth: np.ndarray, groups: Groups) -> float:
    """Eq. 1: Eq. 2 over groups, Eq. 4 over all orders with Eq. 3 over all matchings."""
    task = problem.task

    def link_s(a: int, b: int, size_bytes: float) -> float:
        alpha = (latency[a, b] + latency[b, a]) / 2
        beta = (bandwidth[a, b] + bandwidth[b, a]) / 2
        return 2 * (alpha + size_bytes / beta)

    data_parallel = max(
        sum(link_s(d, e, task.parameter_bytes / task.replicas) for e in group if e != d)
        for group in groups
        for d in group
    )

    def hop_s(first: tuple[int, ...], second: tuple[int, ...]) -> float:
        return min(
            max(link_s(a, b, task.activation_bytes) for a, b in zip(first, order, strict=True))
            for order in itertools.permutations(second)
        )

    hops = {(a, b): hop_s(a, b) for a in groups for b in groups if a != b}
    pipeline = min(sum(hops[pair] for pair in itertools.pairwise(order)) for order in itertools.permutations(groups))
    return data_parallel + pipeline


def all_groupings(devices: tuple[int, ...], replicas: int) -> Iterator[Groups]:
    """Every partition into groups of `replicas`, each once."""
    if not devices:
        yield []
        return
    first, rest = devices[0], devices[1:]
    for others in itertools.combinations(rest, replicas - 1):
        left = tuple(d for d in rest if d not in others)
        for groups in all_groupings(left, replicas):
            yield [(first, *others), *groups]
