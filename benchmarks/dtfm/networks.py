"""The networks on which placements are compared: DT-FM's five cases, and four that its search was not made for."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from isthmus.planners.placement import PlacementProblem, PlacementTask, from_matrices

TABLES = tomllib.loads((Path(__file__).parent / "networks.toml").read_text())
GBIT_BYTES = 1e9 / 8
SITES = (3, 5, 7, 9, 11, 13, 16)
"""Devices at each site of the irregular networks: 64 in all, and no two sites alike."""


def task(stages: int = 8, replicas: int = 8) -> PlacementTask:
    """DT-FM's GPT3-1.3B in eight stages."""
    return PlacementTask(
        stages=stages,
        replicas=replicas,
        activation_bytes=TABLES["activation_gb"] * 1e9,
        parameter_bytes=TABLES["parameter_gb"] * 1e9,
    )


def public_case(number: int) -> PlacementProblem:
    case = TABLES[f"case{number}"]
    site = np.repeat(np.arange(len(case["devices"])), case["devices"])
    latency = np.array(case["delay_ms"], dtype=float) / 1e3
    bandwidth = np.array(case["bandwidth"], dtype=float) * GBIT_BYTES
    return from_matrices(task(), latency[np.ix_(site, site)], bandwidth[np.ix_(site, site)])


def irregular(seed: int, *, asymmetric: bool = False, speeds: bool = False) -> PlacementProblem:
    """Seven sites of unequal size; every link is its own draw around what joins the two sites."""
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(len(SITES)), SITES)
    devices, pair = len(site), np.ix_(site, site)
    latency = _symmetric(rng.uniform(0.005, 0.15, (len(SITES), len(SITES))))
    bandwidth = _symmetric(rng.uniform(0.3, 1.3, (len(SITES), len(SITES)))) * GBIT_BYTES
    np.fill_diagonal(latency, 0.001)
    np.fill_diagonal(bandwidth, rng.uniform(2, 10, len(SITES)) * GBIT_BYTES)
    spread, jitter = rng.uniform(0.5, 1.5, (devices, devices)), rng.uniform(0.7, 1.4, (devices, devices))
    if not asymmetric:
        spread, jitter = _symmetric(spread), _symmetric(jitter)
    # 60 TFLOP/s is half of a V100's peak; speeds from the same to a sixth of it.
    compute = 2.4e14 / (60e12 / rng.uniform(1, 6, devices)) if speeds else None
    return from_matrices(task(), latency[pair] * jitter, bandwidth[pair] * spread, compute)


def uniform(seed: int) -> PlacementProblem:
    """64 devices without sites: latency and bandwidth of every link are draws of their own."""
    rng = np.random.default_rng(seed)
    latency = _symmetric(rng.uniform(0.005, 0.15, (64, 64)))
    return from_matrices(task(), latency, _symmetric(rng.uniform(0.3, 1.3, (64, 64))) * GBIT_BYTES)


def globe(seed: int, *, regions: int = 40, stages: int = 100, replicas: int = 100) -> PlacementProblem:
    """Regions at random places: latency along great circles, bandwidth falls with distance; heavy-tailed speeds."""
    rng = np.random.default_rng(seed)
    place = rng.normal(size=(regions, 3))
    place /= np.linalg.norm(place, axis=1, keepdims=True)
    arc_km = 6371 * np.arccos(np.clip(place @ place.T, -1, 1))
    latency = 0.002 + arc_km / 2e5
    bandwidth = _symmetric(rng.lognormal(0, 0.4, (regions, regions))) * GBIT_BYTES / (0.5 + arc_km / 5000)
    np.fill_diagonal(bandwidth, 10 * GBIT_BYTES)
    devices = stages * replicas
    # Two devices in every region, the rest anywhere.
    kind = np.sort(np.append(np.tile(np.arange(regions), 2), rng.integers(regions, size=devices - 2 * regions)))
    return PlacementProblem(
        task=task(stages, replicas),
        kind=kind,
        latency_s=latency,
        bandwidth_bytes_per_s=bandwidth,
        compute_s=2.4e14 / (20e12 * (1 + rng.pareto(2.0, devices))),
    )


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return np.triu(matrix) + np.triu(matrix, 1).T


NETWORKS: Mapping[str, Callable[[], PlacementProblem]] = {
    **{f"case {n}": (lambda n=n: public_case(n)) for n in range(1, 6)},
    "irregular": lambda: irregular(0),
    "irregular, another seed": lambda: irregular(1),
    "asymmetric": lambda: irregular(2, asymmetric=True),
    "unequal speeds": lambda: irregular(3, speeds=True),
    "10,000 devices": lambda: globe(0),
}
