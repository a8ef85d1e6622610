"""DT-FM's five public networks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np

from isthmus.planners.placement import PlacementProblem, PlacementTask, from_matrices

TABLES = tomllib.loads((Path(__file__).parent / "networks.toml").read_text())
GBIT_BYTES = 1e9 / 8


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
