"""Mime: Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated Learning, 2021, Alg. 1."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from isthmus.federated.algorithms.algorithm import Algorithm, ClientUpdate, Cohort, LocalTrainer, Pass, Values


class Mime(Algorithm, frozen=True):
    """Clients mimic centralised SGD: the server's momentum, SVRG's corrections (Karimireddy et al. 2021).

    The control variate c is the cohort's mean gradient at x in this very round, so a round takes two passes. `lite` is
    MimeLite, which leaves out the correction and takes one.
    """

    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """The server's momentum, which clients apply without changing it."""
    lite: bool = False  # Without SVRG's correction (MimeLite).

    def init_server(self, model: Tensor) -> Values:
        return {"model": model, "momentum": torch.zeros_like(model), "control": torch.zeros_like(model)}

    @property
    def needs_sgd(self) -> str:
        return "clients apply the server's momentum and keep none of their own, which is defined for SGD"

    def broadcast(self, server: Values) -> Values:
        return dict(server) if not self.lite else {name: server[name] for name in ("model", "momentum")}

    @property
    def passes(self) -> tuple[Pass, ...]:
        if self.lite:
            return (
                Pass(returns={"delta": "mean", "gradient": "mean"}, client=self._train_lite, server=self._move_lite),
            )
        return (
            Pass(returns={"gradient": "mean"}, client=self._survey, server=self._control),
            Pass(returns={"delta": "mean"}, client=self._train, server=self._move),
        )

    def _survey(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"gradient": local.full_gradient(local.start(broadcast["model"]))})

    def _control(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {**server, "control": combined["gradient"]}

    def _train(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        x, m, c, beta = broadcast["model"], broadcast["momentum"], broadcast["control"], self.momentum
        y = local.start(x)
        at_x = local.start(x)
        for batch in local.batches():
            g = c - local.gradient(at_x, batch)
            g = g + local.gradient(y, batch)
            y.sub_((1 - beta) * g + beta * m, alpha=local.learning_rate)
        return ClientUpdate(values={"delta": y.sub_(x)})

    def _move(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        beta = self.momentum
        return {
            "model": server["model"] + combined["delta"],
            "momentum": (1 - beta) * server["control"] + beta * server["momentum"],
            "control": server["control"],
        }

    def _train_lite(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        x, m, beta = broadcast["model"], broadcast["momentum"], self.momentum
        y = local.start(x)
        gradient = local.full_gradient(y).clone()
        for batch in local.batches():
            y.sub_((1 - beta) * local.gradient(y, batch) + beta * m, alpha=local.learning_rate)
        return ClientUpdate(values={"delta": y.sub_(x), "gradient": gradient})

    def _move_lite(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return self._move({**server, "control": combined["gradient"]}, combined, cohort)
