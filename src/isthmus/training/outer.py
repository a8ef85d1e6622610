"""The outer parameters and their step (DiLoCo, Alg. 1; Streaming DiLoCo, Alg. 2).

    delta = mean over replicas k of (outer - w_k)              outer <- Nesterov(outer, delta)
    w_k <- mixing x w_k + (1 - mixing) x outer                 DiLoCo mixes nothing: w_k <- outer

Every replica averages to the same bits and makes the same outer step: outer parameters need not travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from isthmus.plans import OuterOptimizer

VALUE, MOMENTUM, DELTA = "outer", "outer_momentum", "outer_delta"
OUTER_KEYS = frozenset({VALUE, MOMENTUM, DELTA})
"""What a checkpoint holds of a parameter's outer state, beside its optimizer's."""


class OuterStep:
    """Some outer tensors, and the step that torch's SGD makes with them. `start`: kept, and changed in place."""

    def __init__(self, start: Sequence[Tensor], config: OuterOptimizer) -> None:
        self._values = [nn.Parameter(value, requires_grad=False) for value in start]
        self._mixing = config.mixing
        nesterov = config.momentum > 0
        self._sgd = torch.optim.SGD(self._values, config.rate, momentum=config.momentum, nesterov=nesterov)

    @property
    def values(self) -> list[Tensor]:
        return [value.detach() for value in self._values]

    @property
    def momenta(self) -> list[Tensor | None]:
        """One for each value; None before the first step, and without momentum."""
        return [self._sgd.state.get(value, {}).get("momentum_buffer") for value in self._values]

    def deltas(self, own: Sequence[Tensor]) -> list[Tensor]:
        """How far a replica's tensors are from the outer ones."""
        return [outer - mine for outer, mine in zip(self.values, own, strict=True)]

    def step(self, deltas: Sequence[Tensor]) -> None:
        """Go down by the mean of the replicas' deltas."""
        for value, delta in zip(self._values, deltas, strict=True):
            value.grad = delta
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    @torch.no_grad()
    def mix_into(self, own: Sequence[Tensor]) -> None:
        """Bring a replica's tensors to the outer ones, but for the share that stays."""
        for mine, outer in zip(own, self.values, strict=True):
            mine.lerp_(outer, 1 - self._mixing)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor], momenta: Sequence[Tensor | None]) -> None:
        """Go on from saved values, copied to where the own ones are, and momenta."""
        for value, saved, momentum in zip(self._values, values, momenta, strict=True):
            value.copy_(saved)
            self._sgd.state.pop(value, None)
            if momentum is not None:
                self._sgd.state[value] = {"momentum_buffer": momentum.clone()}


def joined(saved: Mapping[str, Tensor], parameters: Sequence[str]) -> dict[str, Tensor]:
    """Flat, by key, what a checkpoint holds for all of these parameters (own names)."""
    found: dict[str, Tensor] = {}
    for key in sorted(OUTER_KEYS):
        names = [f"optimizer.{name}.{key}" for name in parameters]
        if all(name in saved for name in names):
            found[key] = torch.cat([saved[name].reshape(-1) for name in names])
    return found
