"""Federated algorithms: each a few pure functions in a file of its own."""

from isthmus.federated.algorithms.algorithm import (
    BUFFERS,
    Algorithm,
    ClientUpdate,
    Cohort,
    Combine,
    LocalTrainer,
    Pass,
    Values,
)
from isthmus.federated.algorithms.registry import AlgorithmSpec, algorithm_names, describe_algorithm, load_algorithm

__all__ = [
    "BUFFERS",
    "Algorithm",
    "AlgorithmSpec",
    "ClientUpdate",
    "Cohort",
    "Combine",
    "LocalTrainer",
    "Pass",
    "Values",
    "algorithm_names",
    "describe_algorithm",
    "load_algorithm",
]
