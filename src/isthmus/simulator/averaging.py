"""How replicas average gradients, as messages: each member of a group reduces one shard and hands it out.

    ready ─► my part of every other member's shard to that member ─► all parts of my shard are here ─► my reduced shard
    to all others ─► all reduced shards are here ─► averaged

This is DT-FM's sharded parameter server. No clock and no links here: the simulation asks which messages leave, and says
when they have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from isthmus.plan import SyncGroup


class Shard(NamedTuple):
    """A message between two members of a group."""

    group: int
    reduced: bool
    source: str
    target: str
    item: int
    size_bytes: int


class Averaged(NamedTuple):
    """A device has the averages of all its groups."""

    device: str
    item: int


class Averaging:
    """The exchanges of all groups. Items do not mix, whatever the order of arrivals."""

    def __init__(self, groups: Sequence[SyncGroup]) -> None:
        self._groups = [g for g in groups if len(g.devices) > 1]
        self._of: dict[str, list[int]] = defaultdict(list)
        for number, group in enumerate(self._groups):
            for device in group.devices:
                self._of[device].append(number)
        self._parts: dict[tuple[int, str, int], int] = defaultdict(int)
        """What has arrived for a member's own shard, its own part included, by (group, device, item)."""
        self._whole: dict[tuple[int, str, int], int] = defaultdict(int)
        """How many reduced shards a member has, its own included."""

    def ready(self, device: str, item: int) -> Iterator[Shard | Averaged]:
        """A device has the gradients of all its micro-batches."""
        for group in self._of[device]:
            yield from self._to_others(group, device, item, reduced=False)
            yield from self._part(group, device, item)
        if not self._of[device]:
            yield Averaged(device, item)

    def arrived(self, shard: Shard) -> Iterator[Shard | Averaged]:
        if shard.reduced:
            yield from self._shard(shard.group, shard.target, shard.item)
        else:
            yield from self._part(shard.group, shard.target, shard.item)

    def _part(self, group: int, device: str, item: int) -> Iterator[Shard | Averaged]:
        self._parts[group, device, item] += 1
        if self._parts[group, device, item] == len(self._groups[group].devices):
            yield from self._to_others(group, device, item, reduced=True)
            yield from self._shard(group, device, item)

    def _shard(self, group: int, device: str, item: int) -> Iterator[Averaged]:
        self._whole[group, device, item] += 1
        if all(self._whole[g, device, item] == len(self._groups[g].devices) for g in self._of[device]):
            yield Averaged(device, item)

    def _to_others(self, group: int, device: str, item: int, *, reduced: bool) -> Iterator[Shard]:
        devices = self._groups[group].devices
        size_bytes = -(-self._groups[group].size_bytes // len(devices))
        for other in devices:
            if other != device:
                yield Shard(group, reduced, device, other, item, size_bytes)
