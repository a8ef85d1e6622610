"""The outer parameters of a stage and their step (DiLoCo, Alg. 1; Streaming DiLoCo, Alg. 2).

    delta = mean over replicas k of (outer - w_k)      outer <- Nesterov(outer, delta)      w_k <- outer

Every replica sums to the same bits and makes the same outer step: outer parameters need not travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from isthmus.plans import OuterOptimizer

VALUE, MOMENTUM, DELTA = "outer", "outer_momentum", "outer_delta"
OUTER_KEYS = frozenset({VALUE, MOMENTUM, DELTA})
"""What a checkpoint holds of a parameter's outer state, beside its optimizer's."""


class OuterParameters:
    """Those of one group, flat, and the step that torch's SGD makes with them."""

    def __init__(self, start: Tensor, config: OuterOptimizer) -> None:
        self._values = nn.Parameter(start.clone(), requires_grad=False)
        nesterov = config.momentum > 0
        self._sgd = torch.optim.SGD([self._values], config.rate, momentum=config.momentum, nesterov=nesterov)

    @property
    def values(self) -> Tensor:
        return self._values.detach()

    def step(self, delta: Tensor) -> Tensor:
        """The values after going down by a delta."""
        self._values.grad = delta
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)
        return self.values

    def state(self) -> dict[str, Tensor]:
        """Flat, by key."""
        momentum = self._sgd.state.get(self._values, {}).get("momentum_buffer")
        return {VALUE: self.values} | ({} if momentum is None else {MOMENTUM: momentum})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave, where the values are; without momentum as before the first step."""
        with torch.no_grad():
            self._values.copy_(state[VALUE])
        if MOMENTUM in state:
            self._sgd.state[self._values] = {"momentum_buffer": state[MOMENTUM].clone()}


def joined(saved: Mapping[str, Tensor], parameters: Sequence[str]) -> dict[str, Tensor]:
    """Flat, by key, what a checkpoint holds for all of these parameters (own names)."""
    found: dict[str, Tensor] = {}
    for key in sorted(OUTER_KEYS):
        names = [f"optimizer.{name}.{key}" for name in parameters]
        if all(name in saved for name in names):
            found[key] = torch.cat([saved[name].reshape(-1) for name in names])
    return found
