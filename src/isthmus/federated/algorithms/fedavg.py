"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, Alg. 1."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, Combine, LocalTrainer, Values


class FedAvg(Algorithm, frozen=True):
    """Clients run SGD from the model; the model becomes their mean by samples (McMahan et al. 2017)."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "weighted_mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": local.descend(broadcast["model"])})

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": combined["delta"].add_(server["model"])}  # in place: a large model less is held
