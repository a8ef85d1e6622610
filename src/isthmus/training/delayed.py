"""A delay of one step: two versions of a stage's weights (PipeDream-2BW: Narayanan et al., ICML 2021, arXiv
2006.09503).

    w(t + 1) = w(t) - update by the gradient of step t at w(t - 1)          w(-1) = w(0)

Forwards and backwards of step t compute at w(t - 1), and its update changes the newest weights, w(t). So step t + 1, at
w(t), may begin while step t is under way, and two versions are enough:

    newest    previous   computes
    w(t)      w(t - 1)   step t; also step t + 1
    w(t + 1)  w(t)       after the update of step t: step t + 1; also step t + 2

Where a parameter is updated in the type that it computes in, the optimizer changes the newest version itself: before
each update that moves into the memory of w(t - 1), which nothing needs any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.accelerators.copies import to_device
from isthmus.errors import InternalError
from isthmus.graph.opgraph import Ref
from isthmus.training.engine import AtStep, TorchEngine
from isthmus.training.loss_accumulator import LossAccumulator
from isthmus.training.optim import PREVIOUS


class DelayedEngine(TorchEngine):
    """A `TorchEngine`, but each step computes at the weights before the last update, and two steps may be under way.

    The first call that names a step names the one that is updated next. What knows no step is of that one: gradients
    that are collected, added and taken.
    """

    def _prepare(self, state: Mapping[str, Tensor]) -> None:
        """Without a previous version in the `state` it is equal to the newest one."""
        self._step: int | None = None  # that is updated next
        self._gradients_ahead: dict[str, Tensor] = {}
        self._losses_ahead = LossAccumulator(self.accelerator)
        self._losses_behind = self._last_losses = self._tallies["train"]
        self._earlier = self.flights.copy()  # micro-batches that are in flight in the step after this one too
        self._buffers: dict[int, Mapping[str, Tensor]] = {}
        """Those that forwards write, as they were before a step, by step."""
        self._previous: dict[str, Tensor] = {}
        self._names = {name: own for name, own in self.trainable.items() if own in self._master}
        for name, own in self._names.items():
            newest = self._variables[name]
            if newest is self._master[own]:  # graphs of a version must not see that the optimizer changes the next one
                newest = self._variables[name] = self._master[own].data.requires_grad_()
            saved = state.get(f"optimizer.{own}.{PREVIOUS}")
            value = newest.detach() if saved is None else to_device(self.accelerator, saved).to(newest.dtype)
            self._previous[name] = value.clone().requires_grad_()

    def _is_ahead(self, step: int) -> bool:
        if self._step is None:
            self._step = step
        return step > self._step

    def at(self, step: int) -> AtStep:
        newest = {name: self._variables[name] for name in self.trainable}
        if self._is_ahead(step):
            return AtStep(newest, self._gradients_ahead, self._losses_ahead)
        return AtStep({**newest, **self._previous}, self._gradients, self._tallies["train"])

    def forward(self, step: int, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        at = self.at(step)
        self._last_losses = at.losses
        self._buffers.setdefault(step, {name: self._variables[name] for name in self._written})
        if micro_batch in self.flights:
            self._earlier[micro_batch] = self.flights.pop(micro_batch)
        return super().forward(step, micro_batch, {Ref(name): t for name, t in at.variables.items()} | dict(inputs))

    def backward(self, micro_batch: int, gradients: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        """Run a micro-batch's backward, in the earlier step where it is in flight in two."""
        later = self.flights.pop(micro_batch, None) if micro_batch in self._earlier else None
        if later is not None:
            self.flights[micro_batch] = self._earlier.pop(micro_batch)
        try:
            return super().backward(micro_batch, gradients)
        finally:
            if later is not None:
                self.flights[micro_batch] = later

    @property
    def last_loss(self) -> Tensor:
        return self._last_losses.last

    def take_loss(self) -> tuple[float, float] | None:
        return self._losses_behind.take() if self.train.loss is not None else None

    def shared_values(self, names: Sequence[str], step: int | None = None) -> dict[str, Tensor]:
        found = self._variables if step is None else self.at(step).variables
        return {name: found[name].detach() for name in names}

    def set_shared(self, values: Mapping[str, Tensor]) -> None:
        for name in values:  # graphs of the step before have theirs
            self._variables[name] = torch.empty_like(self._variables[name]).requires_grad_(
                self._variables[name].requires_grad
            )
        super().set_shared(values)

    def update(self, step: int, norms: Tensor | None) -> None:
        self._turn()
        super().update(step, norms)
        self._buffers.pop(step, None)
        self._step = step + 1
        self._losses_behind = self._tallies["train"]
        self._gradients, self._tallies["train"] = self._gradients_ahead, self._losses_ahead
        self._gradients_ahead, self._losses_ahead = {}, LossAccumulator(self.accelerator)

    def skip_update(self) -> None:
        raise InternalError("a step was left out although the next one may have begun")

    @torch.no_grad()
    def _turn(self) -> None:
        """The newest version becomes the previous one, and what the optimizer changes a copy of it."""
        for name, own in self._names.items():
            unused, newest, master = self._previous[name], self._variables[name], self._master[own]
            self._variables[name], self._previous[name] = unused, newest
            if newest.dtype == master.dtype:
                unused.copy_(newest)
                master.data = unused.detach()

    def state(self) -> dict[str, Tensor]:
        """Between the last update and the next, whatever was computed of the next steps."""
        found = super().state() | {
            f"optimizer.{self._names[n]}.{PREVIOUS}": t.detach() for n, t in self._previous.items()
        }
        held = {} if self._step is None else self._buffers.get(self._step, {})
        return found | {op.target: held[op.name] for op in self.train.variables() if op.name in held}
