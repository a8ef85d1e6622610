"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from msgspec import Meta

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, Combine, LocalTrainer, Values


class FedNova(Algorithm, frozen=True):
    """A client that takes more steps weighs no more for it: directions per step are averaged (Wang et al. 2020).

    With momentum rho, ||a_i||_1 counts steps as momentum prolongs them: (t - rho (1 - rho^t) / (1 - rho)) / (1 - rho).
    """

    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # The momentum of clients' SGD.

    @property
    def needs_sgd(self) -> str:
        return (
            "its paper counts the steps of SGD, with the option momentum of [federated.options], and of no other "
            "optimizer"
        )

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"direction": "weighted_mean", "steps": "weighted_mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        x, rho = broadcast["model"], self.momentum
        if rho:
            y = local.start(x)
            v = torch.zeros_like(y)
            for batch in local.batches():
                y.sub_(v.mul_(rho).add_(local.gradient(y, batch)), alpha=local.learning_rate)
            delta = y.sub_(x)
        else:
            delta = local.descend(x)
        norm = self._norm(local.steps)
        return ClientUpdate(
            values={"direction": delta.div_(norm), "steps": delta.new_full((*delta.shape[:-1], 1), norm)}
        )

    def _norm(self, steps: int) -> float:
        """||a_i||_1."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def largest(self, steps: int) -> Mapping[str, float]:
        return {"steps": self._norm(steps)}

    def change(self, values: Values) -> Values:
        """||a_i||_1 times the direction. No client takes less than one step: a smaller number hides no direction."""
        return {"direction": values["direction"] * values["steps"].abs().clamp(min=1)}

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        """Eq. 9, with the effective number of steps tau = sum p_i ||a_i||_1."""
        return {"model": server["model"] + combined["steps"] * combined["direction"]}
