"""Models that a caller gives as Python objects, in place of a name that a job file could say."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from isthmus.errors import UserError

PREFIX = "given:"
_given: dict[str, nn.Module | Callable[[], nn.Module]] = {}
"""By name, in this process alone."""


def give_model(model: nn.Module | Callable[[], nn.Module]) -> str:
    """The name by which a job refers to the module, or to what builds one. The same for modules of one class with
    parameters of the same names and shapes: a call that resumes the run gives an equal model again."""
    if isinstance(model, nn.Module):
        form = hashlib.sha256(repr([(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()]).encode())
        name = f"{PREFIX}{type(model).__name__}-{form.hexdigest()[:8]}"
    else:
        name = f"{PREFIX}{getattr(model, '__name__', type(model).__name__)}"
    _given[name] = model
    return name


class WithLoss(nn.Module):
    """A model and a loss behind one forward, which takes columns."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], inputs: tuple[str, ...], target: str) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._inputs, self._target = inputs, target

    def forward(self, **columns: Tensor) -> Tensor:
        return self.loss(self.model(*(columns[name] for name in self._inputs)), columns[self._target])


def is_with_loss(name: str) -> bool:
    """Whether a name that was given is that of a model with a loss around it."""
    return name.startswith(f"{PREFIX}{WithLoss.__name__}-")


def own_names(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the model called `name`, under the names that the module which was given has for them."""
    if not is_with_loss(name):
        return dict(weights)
    prefix = "model."  # the field of `WithLoss`
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def build_given(name: str) -> nn.Module:
    """A copy of the module, with its weights; under `FakeTensorMode` without them. UserError where it was not given."""
    if name not in _given:
        what = "is a Python object of another process: pass it again to `isthmus.train` or `isthmus.federate`"
        raise UserError(f"model {name!r}: {what}")
    model = _given[name]
    if not isinstance(model, nn.Module):
        return model()
    if not isinstance(torch.empty(0), FakeTensor):
        return copy.deepcopy(model).train()
    held: list[Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _fake(tensor) for tensor in held}).train()


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
