"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, 2020, Alg. 1 with option II."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, Combine, LocalTrainer, Values


class Scaffold(Algorithm, frozen=True):
    """Every client keeps a control variate that corrects its drift from the others (Karimireddy et al. 2020)."""

    server_learning_rate: Annotated[float, Meta(gt=0)] = 1.0  # The rate of the server's step.

    def init_server(self, model: Tensor) -> Values:
        return {"model": model, "control": torch.zeros_like(model)}

    def init_client(self, model: Tensor) -> Values | None:
        return {"control": torch.zeros_like(model)}

    def broadcast(self, server: Values) -> Values:
        return dict(server)

    @property
    def needs_sgd(self) -> str:
        return "its control variate is the change over steps times rate, which is a mean gradient for SGD alone"

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean", "control_delta": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        assert state is not None, "init_client gives one"
        x, c, c_i, eta = broadcast["model"], broadcast["control"], state["control"], local.learning_rate
        correction = c - c_i
        delta = local.descend(x, lambda g, y: g.add_(correction))
        control_delta = (-c).sub(delta, alpha=1 / (local.steps * eta))  # c_i+ - c_i = -c + (x - y) / (K eta)
        return ClientUpdate(
            values={"delta": delta, "control_delta": control_delta},
            state=lambda counted: {"control": c_i + counted["control_delta"]},
        )

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        share = cohort.clients / cohort.population
        return {
            "model": server["model"] + self.server_learning_rate * combined["delta"],
            "control": server["control"] + share * combined["control_delta"],
        }
