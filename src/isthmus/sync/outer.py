"""DiLoCo: a period of inner steps, then one outer step of Nesterov SGD on what the workers have moved (Algorithm 1).

    delta = mean over k of (outer - w_k)      outer <- Nesterov(outer, delta)      w_k <- outer

Besides the model it keeps the outer parameters and their momentum: two copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.plans import OuterOptimizer
from isthmus.sync.compressed import CompressedAverager
from isthmus.sync.divergence import MeasuredAverage
from isthmus.sync.local import LocalSteps
from isthmus.sync.mode import Setting, restored
from isthmus.sync.updates import Closure, average_with_state
from isthmus.training.outer import OuterStep


class DiLoCo(LocalSteps):
    """The outer parameters are one flat tensor per dtype and device."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._averager = setting.delta_averager()
        options = setting.options
        outer = OuterOptimizer(rate=options.outer_rate, momentum=options.outer_momentum)
        self._outer = OuterStep([buffer.clone() for buffer in setting.model.buffers], outer)

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        if s.options.average_state:
            s.updates.check_to_average(s.model.layers, closure, scaler)
        if s.options.average_state and self.ends_period:
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, s.model.layers)
        loss = s.updates.whole(closure, scaler)
        if self.ends_period:
            self._exchange()
        return loss

    @torch.no_grad()
    def _exchange(self) -> None:
        s = self.setting
        deltas = self._outer.deltas(s.model.buffers)
        if not s.options.average_state:
            measured = MeasuredAverage(self._averager, deltas)
            with s.monitor.waiting():
                s.monitor.diverged(measured.wait())
        self._outer.step(deltas)
        self._outer.mix_into(s.model.buffers)

    def state(self) -> dict[str, Tensor]:
        errors = self._averager.state("outer") if isinstance(self._averager, CompressedAverager) else {}
        return {**super().state(), **outer_state(self._outer, "outer"), **errors}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        load_outer(self._outer, state, "outer")
        if isinstance(self._averager, CompressedAverager):
            self._averager.load(state, "outer")


def outer_state(outer: OuterStep, prefix: str) -> dict[str, Tensor]:
    """Its tensors by name, for a saved state of sync."""
    found: dict[str, Tensor] = {}
    for number, (value, momentum) in enumerate(zip(outer.values, outer.momenta, strict=True)):
        found[f"{prefix}.{number}"] = value
        if momentum is not None:
            found[f"{prefix}.{number}.momentum"] = momentum
    return found


def load_outer(outer: OuterStep, state: Mapping[str, Tensor], prefix: str) -> None:
    """Go on from what `outer_state` gave. Raises UserError for tensors that do not fit."""
    own = [(f"{prefix}.{number}", value) for number, value in enumerate(outer.values)]
    momenta = [f"{name}.momentum" for name, _ in own]
    outer.load(
        [restored(state, name, value) for name, value in own],
        [
            restored(state, name, value) if name in state else None
            for name, (_, value) in zip(momenta, own, strict=True)
        ],
    )
