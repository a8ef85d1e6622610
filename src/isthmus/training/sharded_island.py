"""An island whose ranks own the parameters together: a stage may be larger than one of them can hold.

Rank 0 is the engine that the rest of the program sees, as of any island. What changes parts is said to all ranks, and
what somebody wants whole is put together on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor

from isthmus.training.engine import Engine
from isthmus.training.island import NORMS, IslandEngine
from isthmus.training.ranks import Command, Ranks, StageSetUp
from isthmus.training.sharded import ShardedEngine, Whole


class ShardedIsland(IslandEngine):
    """As `Engine`, on rank 0."""

    @property
    def _parts(self) -> ShardedEngine:
        return cast(ShardedEngine, self._engine)

    def _split(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those that are shared out, and those that each rank has whole."""
        apart = [n for n in names if self._parts.is_shared_out(n)]
        return apart, [n for n in names if not self._parts.is_shared_out(n)]

    def _whole(self, what: Whole, names: Sequence[str]) -> dict[str, Tensor | None]:
        if names:
            self._tell(Command(kind="whole", what=what, names=tuple(names)))
        return self._parts.whole(what, names)

    def _put(self, command: Command, values: Mapping[str, Tensor], own: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Each rank's parts of these values."""
        for rank in range(1, self._ranks.count):
            parts = {name: self._parts.part_of(value, rank) for name, value in values.items()}
            self._ranks.send(rank, command, [parts])
        own({name: self._parts.part_of(value, 0) for name, value in values.items()})

    def _spread(self, names: Sequence[str]) -> None:
        _, whole = self._split(names)
        if whole:
            super()._spread(whole)

    def shared_values(self, names: Sequence[str], step: int | None = None) -> dict[str, Tensor]:
        apart, whole = self._split(names)
        found = _there(self._whole("values", apart)) | self._engine.shared_values(whole)
        return {name: found[name] for name in names}

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        self._sum()
        self._put(Command(kind="add"), gradients, self._engine.add_gradients)

    def take_gradients(self, names: Sequence[str]) -> dict[str, Tensor | None]:
        self._sum()
        return self._whole("sums", names)

    def parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        return _there(self._whole("parameters", names))

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        self._put(Command(kind="put"), values, self._engine.set_parameters)

    def collect(self, count: float | None) -> Tensor:
        self._sum()
        self._tell(Command(kind="collect", count=count))
        return self._engine.collect(count)

    def gradients(self) -> dict[str, Tensor]:
        own = self._engine.trainable
        apart, _ = self._split(list(own))
        return {own[name]: value for name, value in _there(self._whole("gradients", apart)).items()}

    def update(self, step: int, norms: Tensor | None) -> None:
        self._tell(Command(kind="update", step=step), [{NORMS: norms}] if norms is not None else [])
        self._engine.update(step, norms)

    def skip_update(self) -> None:
        self._tell(Command(kind="skip"))
        self._engine.skip_update()

    def state(self) -> dict[str, Tensor]:
        self._tell(Command(kind="state"))
        return self._engine.state()


def _there(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if value is not None}


def island_engine(made: StageSetUp, weights: Mapping[str, Tensor], ranks: Ranks) -> Engine:
    """UserError where the stage cannot be shared out. `weights` as those of `TorchEngine`."""
    return (ShardedIsland if made.sharded else IslandEngine)(made, weights, ranks)
