"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, 2021, Alg. 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, Combine, LocalTrainer, Values


class FedDyn(Algorithm, frozen=True):
    """Every client keeps a linear term of its loss, so that their optima meet the server's (Acar et al. 2021)."""

    alpha: Annotated[float, Meta(gt=0)] = 0.01  # Strength of the dynamic regularisation.

    def init_server(self, model: Tensor) -> Values:
        return {"model": model, "h": torch.zeros_like(model)}

    def init_client(self, model: Tensor) -> Values | None:
        return {"gradient": torch.zeros_like(model)}

    @property
    def needs_sgd(self) -> str:
        return "it takes alpha times the change for a gradient that was followed, which other steps than SGD's are not"

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        """SGD on L(y) - <lambda, y> + alpha/2 ||y - x||^2."""
        assert state is not None, "init_client gives one"
        x, linear = broadcast["model"], state["gradient"]
        delta = local.descend(x, lambda g, y: g.sub_(linear).add_(y - x, alpha=self.alpha))
        return ClientUpdate(
            values={"delta": delta},
            state=lambda counted: {"gradient": linear.sub(counted["delta"], alpha=self.alpha)},
        )

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        """h loses alpha/m of the sum over the clients that took part; the model is their mean less h / alpha."""
        delta = combined["delta"]
        h = server["h"] - self.alpha * cohort.clients / cohort.population * delta
        return {"model": server["model"] + delta - h / self.alpha, "h": h}
