"""FedOpt: Reddi et al., Adaptive Federated Optimization, 2021, Alg. 2; FedAvgM: Hsu et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, Combine, LocalTrainer, Values
from isthmus.federated.algorithms.fedavg import FedAvg

Share = Annotated[float, Meta(ge=0, lt=1)]
Positive = Annotated[float, Meta(gt=0)]


class ServerOptimizer(Algorithm, frozen=True):
    """FedAvg's clients; the server takes their mean change for a gradient."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "weighted_mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return FedAvg().client(local, broadcast, state)


class FedAvgM(ServerOptimizer, frozen=True):
    """FedAvg with momentum on the server (Hsu et al. 2019)."""

    server_learning_rate: Positive = 1.0  # The rate of the server's step.
    momentum: Share = 0.9  # The momentum of the server's step.

    def init_server(self, model: Tensor) -> Values:
        return {"model": model, "momentum": torch.zeros_like(model)}

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        m = self.momentum * server["momentum"] + combined["delta"]
        return {"model": server["model"] + self.server_learning_rate * m, "momentum": m}


class _Adaptive(ServerOptimizer, frozen=True):
    server_learning_rate: Positive = 0.01  # The rate of the server's step.
    beta1: Share = 0.9  # Decay of the mean change.
    beta2: Share = 0.99  # Decay of the squared change.
    tau: Positive = 1e-3  # Added to the denominator: how adaptive the step is.

    def init_server(self, model: Tensor) -> Values:
        return {"model": model, "momentum": torch.zeros_like(model), "squares": torch.full_like(model, self.tau**2)}

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        delta = combined["delta"]
        m = self.beta1 * server["momentum"] + (1 - self.beta1) * delta
        v = self.squares(server["squares"], delta.square())
        step = m / (v.sqrt() + self.tau)
        return {"model": server["model"] + self.server_learning_rate * step, "momentum": m, "squares": v}

    def squares(self, v: Tensor, new: Tensor) -> Tensor:
        """The next estimate of the squared changes, from the last one and this round's."""
        raise NotImplementedError


class FedAdam(_Adaptive, frozen=True):
    """The mean change as a gradient for Adam on the server (Reddi et al. 2021)."""

    def squares(self, v: Tensor, new: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * new


class FedYogi(_Adaptive, frozen=True):
    """The mean change as a gradient for Yogi on the server (Reddi et al. 2021)."""

    def squares(self, v: Tensor, new: Tensor) -> Tensor:
        return v - (1 - self.beta2) * new * torch.sign(v - new)
