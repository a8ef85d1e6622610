"""What a device holds beside the stage that it trains: states to go on from, its own and copies of others'."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Generic, TypeVar

from isthmus.protocol.recovery import StateHolding

Value = TypeVar("Value")


class StateInventory(Generic[Value]):
    """Values of parts by plan epoch and step. A value is whatever the driver keeps for a part.

    One thread changes it; others may look meanwhile, as nothing is changed in place.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], dict[str, Value]] = {}

    def keep(self, epoch: int, step: int, values: Mapping[str, Value]) -> None:
        """Parts of the state after `step` steps, as this epoch made it, besides those that are here of it already."""
        self._kept = {**self._kept, (epoch, step): {**self._kept.get((epoch, step), {}), **values}}

    def holdings(self) -> tuple[StateHolding, ...]:
        return tuple(StateHolding(epoch=e, step=s, parts=frozenset(kept)) for (e, s), kept in self._kept.items())

    def values(self, step: int, parts: Set[str]) -> dict[str, Value]:
        """The parts that are here of the state after `step`; of two epochs' the later one's."""
        found: dict[str, Value] = {}
        for (_, at), kept in sorted(self._kept.items(), key=lambda entry: entry[0]):
            if at == step:
                found |= {part: value for part, value in kept.items() if part in parts}
        return found

    def begin(self, step: int) -> None:
        """An epoch begins from the state after `step`: what lies beyond is of a line that ended."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] <= step}

    def retire(self, step: int) -> None:
        """There is a whole snapshot of this step: forget those before."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] >= step}
