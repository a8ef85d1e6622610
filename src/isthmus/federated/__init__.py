"""Federated learning: algorithms, exact sums, client states, and where clients train."""

from isthmus.extensions import what_is_missing

try:
    from isthmus.federated.algorithms import (
        Algorithm,
        AlgorithmSpec,
        ClientUpdate,
        Cohort,
        Combine,
        LocalTrainer,
        Pass,
        Values,
        algorithm_names,
        describe_algorithm,
        load_algorithm,
    )
    from isthmus.federated.client_trainer import ClientTrainer, TrainingTask
    from isthmus.federated.local import LocalConfig
    from isthmus.federated.server import Commits, RunIdentity, Server
    from isthmus.federated.states import StateForm, StateStore
except ModuleNotFoundError as e:
    missing = what_is_missing("isthmus.federated", e)
    if missing is None:
        raise
    raise ModuleNotFoundError(missing, name=e.name) from e

__all__ = [
    "Algorithm",
    "AlgorithmSpec",
    "ClientTrainer",
    "ClientUpdate",
    "Cohort",
    "Combine",
    "Commits",
    "LocalConfig",
    "LocalTrainer",
    "Pass",
    "RunIdentity",
    "Server",
    "StateForm",
    "StateStore",
    "TrainingTask",
    "Values",
    "algorithm_names",
    "describe_algorithm",
    "load_algorithm",
]
