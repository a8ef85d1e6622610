"""A stage's part in exchanges of weights: of a replica that never waits, others' changes are added between two steps,
and the replica's own weights are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from isthmus.accelerators.copies import all_to_device
from isthmus.errors import PeerError
from isthmus.graph import StageGraph
from isthmus.protocol.run_messages import OpenItem, WeightExchange
from isthmus.training.engine import Engine


class OpenedExchange(NamedTuple):
    order: OpenItem
    exchange: WeightExchange
    amounts: Mapping[str, Tensor]
    """Amounts that are added to parameters before the step, by the module's own names, [amounts of a parameter,
    elements]: one after the other, since their sum would round otherwise."""


class StageExchanges:
    """Used by the compute lane alone."""

    def __init__(
        self, engine: Engine, train: StageGraph, steps: int, read: Callable[[int, Mapping[str, Tensor]], None]
    ) -> None:
        """The run has `steps` steps. `read` gets an item and the weights wanted of it, before anything changes them."""
        self._engine, self._train, self._steps, self._read = engine, train, steps, read
        self._opened: dict[int, OpenedExchange] = {}
        self._rate_step: int | None = None
        self.before: dict[str, Tensor] = {}
        """Parameters as the last whole step left them, where amounts were added since, by the module's own names."""

    def opened(self, found: OpenedExchange) -> OpenItem:
        """PeerError for the rate of a step that the run has not, and for amounts that are not a parameter's."""
        if (step := found.exchange.rate_step) >= self._steps:
            raise PeerError(f"coordinator: opened an item with the rate of step {step}, the run has {self._steps}")
        for op in self._train.variables():
            got, shape = found.amounts.get(op.target), op.outputs[0].shape_at(1)
            size = math.prod(shape)
            if got is not None and (got.numel() < size or got.numel() % max(size, 1)):
                raise PeerError(f"coordinator: sent amounts {list(got.shape)} of {op.target} {list(shape)}")
        self._opened[found.order.item.index] = found
        return found.order

    def begin(self, item: int) -> None:
        """Before anything of the item is done here: a snapshot of the steps before has none of its amounts."""
        if (found := self._opened.pop(item, None)) is None:
            return
        self._rate_step = found.exchange.rate_step
        train = self._train
        names = {op.target: op.name for op in train.variables() if op.name not in train.shared_from}
        own = {name: names[name] for name in self._engine.owned}
        held = self._engine.parameters(list(own.values()))
        self.before = {name: held[own[name]].clone() for name in found.amounts if name in own}
        if self.before:
            amounts = all_to_device(self._engine.accelerator, {name: found.amounts[name] for name in self.before})
            added = {own[name]: _added(value, amounts[name]) for name, value in self.before.items()}
            self._engine.set_parameters(added)
        if wanted := {name: held[own[name]] for name in found.exchange.wanted if name in own}:
            self._read(item, wanted)

    def end(self, step: int) -> int:
        """The learning rate's step of a training step, which is done but for its update."""
        found, self._rate_step = self._rate_step, None
        self.before = {}
        return step if found is None else found


def _added(value: Tensor, amounts: Tensor) -> Tensor:
    for amount in amounts.view(amounts.numel() // max(value.numel(), 1), *value.shape):
        value = value + amount
    return value
