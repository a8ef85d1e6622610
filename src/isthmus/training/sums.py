"""What a stage adds to the sums with other replicas, as one flat buffer for each group.

    gradients:  elements of all parameters | for each parameter 1 if it has a gradient, else 0 | the loss's count
    parameters: elements of all parameters, times the replica's share of the batch

A buffer is made anew for each sum: parts of the last one may still wait in a send lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.errors import UserError
from isthmus.plan import Averages
from isthmus.training.engine import Engine


class GroupBuffer:
    """One group's parameters on one stage, by their names in the graph, and the buffer that is being summed."""

    def __init__(self, engine: Engine, parameters: Sequence[str], averages: Averages, share: float) -> None:
        """`share` is the replica's part of each step's micro-batches. UserError for parameters of float64."""
        self._engine = engine
        self._names = tuple(parameters)
        self._averages = averages
        self._share = share
        self.flat = torch.empty(0)
        for name, value in engine.parameters(self._names).items():
            if value.dtype != torch.float32:
                raise UserError(f"parameter {name!r}: got {value.dtype}, expected float32: replicas sum in float32")

    def fill(self, count: float) -> None:
        """Take the engine's gradients, or its parameters. `count` is the replica's own."""
        if self._averages == "parameters":
            held = self._engine.parameters(self._names)
            self.flat = torch.cat([held[name].reshape(-1) for name in self._names]).mul_(self._share)
            return
        found = self._engine.take_gradients(self._names)
        shapes = self._engine.parameters(self._names)
        flags = [0.0 if found[name] is None else 1.0 for name in self._names]
        pieces = [g.reshape(-1) if (g := found[name]) is not None else torch.zeros_like(shapes[name]).reshape(-1)
                  for name in self._names]  # fmt: skip
        self.flat = torch.cat([*pieces, torch.tensor([*flags, count]).to(pieces[0].device)])

    def take(self) -> float:
        """Hand the sums to the engine; returns the count of all replicas, 0 where none is told."""
        shapes = self._engine.parameters(self._names)
        sizes = [shapes[name].numel() for name in self._names]
        told = len(self._names) + 1 if self._averages == "gradients" else 0
        *pieces, rest = self.flat.split([*sizes, told])
        values = {name: p.view(shapes[name].shape) for name, p in zip(self._names, pieces, strict=True)}
        if self._averages == "parameters":
            self._engine.set_parameters(values)
            return 0.0
        present = rest[:-1].tolist()
        self._engine.add_gradients({n: values[n] for n, is_there in zip(self._names, present, strict=True) if is_there})
        return float(rest[-1])
