"""What a stage does of an exchange of weights: of a replica that never waits, others' changes are added after an
update, and the replica's own weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from isthmus.graph import StageGraph
from isthmus.protocol.run_messages import OpenItem, WeightExchange
from isthmus.training.engine import Engine


class OpenedExchange(NamedTuple):
    """A training step that comes with an exchange."""

    order: OpenItem
    exchange: WeightExchange
    amounts: Mapping[str, Tensor]
    """By the module's own names: what is added to parameters after the update, [elements]."""

    def apply(self, engine: Engine, train: StageGraph) -> dict[str, Tensor]:
        """Add the amounts to parameters of this stage, and return those of it that are wanted. The rest is other
        stages'."""
        names = {op.target: op.name for op in train.variables() if op.name not in train.shared_from}
        own = {name: names[name] for name in engine.owned}
        held = engine.parameters(list(own.values()))
        for name in self.amounts.keys() & own.keys():
            before = held[own[name]]
            engine.set_parameters({own[name]: before + self.amounts[name].view(before.shape)})
        return {name: held[own[name]] for name in self.exchange.wanted if name in own}
