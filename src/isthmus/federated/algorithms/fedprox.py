"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020, Eq. 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, Combine, LocalTrainer, Values


class FedProx(Algorithm, frozen=True):
    """FedAvg with mu/2 ||y - x||^2 in every client's loss, which keeps y near x (Li et al. 2020)."""

    mu: Annotated[float, Meta(ge=0)] = 0.01  # Strength of the proximal term.

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "weighted_mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        x = broadcast["model"]
        return ClientUpdate(values={"delta": local.descend(x, lambda g, y: g.add_(y - x, alpha=self.mu))})

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": server["model"] + combined["delta"]}
