"""Which local steps go together with which algorithm."""

from __future__ import annotations

import torch

from isthmus.combinations import refused
from isthmus.federated.admission import first_state, tried
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.algorithms.registry import GIVEN
from isthmus.federated.local import LocalConfig
from isthmus.federated.local_steps import StepsByRound, what_is_set


def check_steps(name: str, algorithm: Algorithm, local: LocalConfig, rounds: int) -> None:
    """UserError for optimizers and learning rates that cannot be, and for those that the algorithm of this name does
    not allow: its corrections are defined for SGD, or its clients make steps of SGD themselves."""
    by_round = StepsByRound(local.tabled(rounds), rounds)
    by_round.check()
    if local.is_plain:
        return
    if reason := algorithm.needs_sgd:
        field, got = what_is_set(local.optimizer, local.clip_norm)
        raise refused("optimizers", "an algorithm of SGD", f"{got} for {name.removeprefix(GIVEN)}", field, reason)
    model = torch.zeros(1)
    broadcast, state = algorithm.broadcast(algorithm.init_server(model)), first_state(algorithm, model)
    for one in algorithm.passes:
        tried(one, broadcast, state, lambda: by_round.at(0).learning_rate)
