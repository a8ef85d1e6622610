"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017, Alg. 1."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.federated.algorithms.algorithm import Algorithm, Cohort, Combine, Local, Update, Values


class FedAvg(Algorithm, frozen=True):
    """Clients run SGD from the model; the model becomes their mean by samples (McMahan et al. 2017)."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "weighted_mean"}

    def client(self, local: Local, told: Values, state: Values | None) -> Update:
        return Update(values={"delta": local.descend(told["model"])})

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": combined["delta"].add_(server["model"])}  # in place: a large model less is held
