"""A stage's summands in the sums with other replicas, as one flat buffer for each group.

    gradients:  elements of all parameters | for each parameter 1 if it has a gradient, else 0 | the loss's count
    parameters: elements of all parameters, times the replica's share of the batch
    deltas:     how far they are from the outer parameters, times that share

A buffer is made anew for each sum: parts of the last one may still wait in a send lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from isthmus.accelerators.copies import PendingRead, to_device
from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.training.engine import Engine
from isthmus.training.optim import DELTA, MOMENTUM, VALUE, OuterStep, joined


class GroupBuffer(Protocol):
    flat: Tensor

    def fill(self, count: float) -> None:
        """Take from the engine what is to be summed. `count` is the replica's own."""

    def take(self) -> float:
        """Hand the sums to the engine. Returns the count of all replicas, 0 if none was received."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint beside the engine's state, by name. No sum is under way."""
        ...


class Parameters:
    """Some parameters of a stage as one row. Keys of `own` are their names in the graph, values their own."""

    def __init__(self, engine: Engine, own: Mapping[str, str]) -> None:
        """UserError for parameters of float64."""
        self.engine = engine
        self.names, self.own = tuple(own), tuple(own.values())
        self.shapes: list[torch.Size] = []
        self.device = engine.accelerator.device
        for name, value in engine.parameters(self.names).items():
            if value.dtype != torch.float32:
                raise UserError(f"parameter {name!r}: got {value.dtype}, expected float32: replicas sum in float32")
            self.shapes.append(value.shape)
        self.elements = sum(shape.numel() for shape in self.shapes)

    def row(self) -> Tensor:
        held = self.engine.parameters(self.names)
        return torch.cat([held[name].reshape(-1) for name in self.names])

    def apart(self, row: Tensor) -> list[Tensor]:
        """Views of a row, one for each parameter."""
        pieces = row.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def put(self, row: Tensor) -> None:
        self.engine.set_parameters(dict(zip(self.names, self.apart(row), strict=True)))


class GradientSum:
    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.flat = torch.empty(0)
        self._present: tuple[tuple[float, ...], Tensor] | None = None

    def fill(self, count: float) -> None:
        names, shapes = self._parameters.names, self._parameters.shapes
        found = self._parameters.engine.take_gradients(names)
        flags = tuple(0.0 if found[name] is None else 1.0 for name in names)
        device = self._parameters.device
        pieces = [
            torch.zeros(shape.numel(), device=device) if (g := found[name]) is None else g.reshape(-1)
            for name, shape in zip(names, shapes, strict=True)
        ]
        counted = torch.full((1,), count, device=device)
        self.flat = torch.cat([*pieces, self._flags(flags), counted])

    def _flags(self, flags: tuple[float, ...]) -> Tensor:
        if self._present is None or self._present[0] != flags:
            self._present = flags, to_device(self._parameters.engine.accelerator, torch.tensor(flags))
        return self._present[1]

    def take(self) -> float:
        row, rest = self.flat.split([self._parameters.elements, len(self._parameters.names) + 1])
        read = PendingRead(self._parameters.engine.accelerator, rest).values().tolist()
        summed = zip(self._parameters.names, self._parameters.apart(row), read[:-1], strict=True)
        self._parameters.engine.add_gradients({name: value for name, value, present in summed if present})
        return float(read[-1])

    def state(self) -> dict[str, Tensor]:
        return {}


class ParameterSum:
    def __init__(self, parameters: Parameters, share: float) -> None:
        self._parameters, self._share = parameters, share
        self.flat = torch.empty(0)

    def fill(self, count: float) -> None:
        self.flat = self._parameters.row().mul_(self._share)

    def take(self) -> float:
        self._parameters.put(self.flat)
        return 0.0

    def state(self) -> dict[str, Tensor]:
        return {}


class DeltaSum:
    """Goes on from a checkpoint's outer parameters where it has them all, else from the parameters as they are."""

    def __init__(
        self, parameters: Parameters, share: float, outer: OuterOptimizer, saved: Mapping[str, Tensor]
    ) -> None:
        self._parameters, self._share = parameters, share
        self._outer = OuterStep([parameters.row()], outer)
        self.flat = torch.empty(0)
        self._begun = False
        accelerator = parameters.engine.accelerator
        held = {key: to_device(accelerator, row) for key, row in joined(saved, parameters.own).items()}
        if held:
            self._outer.load([held[VALUE]], [held.get(MOMENTUM)])
        if DELTA in held:
            self.flat, self._begun = held[DELTA], True

    def fill(self, count: float) -> None:
        (delta,) = self._outer.deltas([self._parameters.row()])
        self.flat = delta.mul_(self._share)
        self._begun = True

    def take(self) -> float:
        if self._begun:  # else it was to begin before a checkpoint that knows nothing of it
            self._outer.step([self.flat])
            row = self._parameters.row()
            self._outer.mix_into([row])
            self._parameters.put(row)
            self._begun = False
        return 0.0

    def state(self) -> dict[str, Tensor]:
        (value,), (momentum,) = self._outer.values, self._outer.momenta
        held = {VALUE: value, MOMENTUM: momentum, DELTA: self.flat if self._begun else None}
        return {
            f"optimizer.{name}.{key}": piece
            for key, row in held.items()
            if row is not None
            for name, piece in zip(self._parameters.own, self._parameters.apart(row), strict=True)
        }


def summed(
    parameters: Parameters, share: float | None, outer: OuterOptimizer | None, saved: Mapping[str, Tensor]
) -> GroupBuffer:
    """The buffer of a group: of gradients without `share`, the replica's part of each step's micro-batches; of deltas
    with an outer step, which goes on from what `saved` holds of it."""
    if share is None:
        return GradientSum(parameters)
    return ParameterSum(parameters, share) if outer is None else DeltaSum(parameters, share, outer, saved)


def add_in_order(own: Tensor, here: int, arrived: Mapping[int, Tensor]) -> None:
    """Add to what this worker has what others sent, in the order of workers. So copies of a stage with a micro-batch
    each sum as a loop over micro-batches does, to the bit."""
    parts = {**arrived, here: own.clone()}
    first, *others = sorted(parts)
    own.copy_(parts[first])
    for worker in others:
        own += parts[worker]
