"""DiLoCo: a period of inner steps, then one outer step of Nesterov SGD on what the workers have moved (Algorithm 1).

    delta = mean over k of (outer - w_k)      outer <- Nesterov(outer, delta)      w_k <- outer

Besides the model it keeps the outer parameters and their momentum: two copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from isthmus.sync.compressed import CompressedAverager
from isthmus.sync.divergence import MeasuredAverage
from isthmus.sync.local import LocalSteps
from isthmus.sync.mode import Setting, restored
from isthmus.sync.options import Options
from isthmus.sync.updates import Closure, average_with_state


class DiLoCo(LocalSteps):
    """The outer step is torch's own SGD, on one flat parameter per dtype and device."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._averager = setting.delta_averager()
        self._outer = OuterStep([buffer.clone() for buffer in setting.model.buffers], setting.options)

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
        deltas = [outer - own for outer, own in zip(self._outer.values, s.model.buffers, strict=True)]
        if not s.options.average_state:
            measured = MeasuredAverage(self._averager, deltas)
            with s.monitor.waiting():
                s.monitor.diverged(measured.wait())
        self._outer.apply(deltas)
        for outer, own in zip(self._outer.values, s.model.buffers, strict=True):
            own.copy_(outer)

    def state(self) -> dict[str, Tensor]:
        errors = self._averager.state("outer") if isinstance(self._averager, CompressedAverager) else {}
        return {**super().state(), **self._outer.state("outer"), **errors}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self._outer.load(state, "outer")
        if isinstance(self._averager, CompressedAverager):
            self._averager.load(state, "outer")


class OuterStep:
    """Nesterov SGD on some tensors, one outer step at a time."""

    def __init__(self, values: list[Tensor], options: Options) -> None:
        self.values = [nn.Parameter(value, requires_grad=False) for value in values]
        momentum = options.outer_momentum
        self._optimizer = torch.optim.SGD(self.values, lr=options.outer_rate, momentum=momentum, nesterov=momentum > 0)

    def apply(self, deltas: list[Tensor]) -> None:
        """`deltas`: what to go down by, of the shapes of `values`."""
        for value, delta in zip(self.values, deltas, strict=True):
            value.grad = delta
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self, prefix: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, value in enumerate(self.values):
            found[f"{prefix}.{number}"] = value.detach()
            momentum = self._optimizer.state.get(value, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"{prefix}.{number}.momentum"] = momentum
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], prefix: str) -> None:
        for number, value in enumerate(self.values):
            value.copy_(restored(state, f"{prefix}.{number}", value))
            self._optimizer.state.pop(value, None)
            if (name := f"{prefix}.{number}.momentum") in state:
                self._optimizer.state[value] = {"momentum_buffer": restored(state, name, value).clone()}
