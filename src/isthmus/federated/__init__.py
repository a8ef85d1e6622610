"""Federated learning: algorithms, exact sums, client states, and where clients train."""

from isthmus.extensions import what_is_missing

try:
    from isthmus.federated.algorithms import (
        Algorithm,
        AlgorithmSpec,
        Cohort,
        Combine,
        Local,
        Pass,
        Update,
        Values,
        algorithm_names,
        describe_algorithm,
        load_algorithm,
    )
    from isthmus.federated.local import LocalConfig
    from isthmus.federated.server import Commits, Identity, Server
    from isthmus.federated.state_form import StateForm
    from isthmus.federated.states import StateStore
    from isthmus.federated.worksite import Work, Worksite
except ModuleNotFoundError as e:
    missing = what_is_missing("isthmus.federated", e)
    if missing is None:
        raise
    raise ModuleNotFoundError(missing, name=e.name) from e

__all__ = [
    "Algorithm", "AlgorithmSpec", "Cohort", "Combine", "Commits", "Identity", "Local", "LocalConfig", "Pass",
    "Server", "StateForm", "StateStore", "Update", "Values", "Work", "Worksite", "algorithm_names",
    "describe_algorithm", "load_algorithm",
]  # fmt: skip
