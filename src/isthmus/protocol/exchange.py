"""The sums that one worker makes with workers of other replicas: which parts leave, and when a sum is complete.

    start ─► round 0: send, wait, merge ─► round 1: send, wait, merge ─► ... ─► summed

Each of a worker's groups goes through its own rounds; what arrives early waits. No clock, link or tensor here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from isthmus.plans.collective import Round
from isthmus.protocol.run_messages import PartsArrived
from isthmus.wire_types import Count, Many, Place


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group from one member's side. In its rounds the others are workers' numbers."""

    group: Place
    rounds: Many[Round]
    iterations: Many[Count] = (0,)  # in which steps of a period it is summed


class PartsPort(Protocol):
    """An exchange asks this of its host."""

    def send_parts(self, group: int, turn: int, target: int, item: int) -> None:
        """Send worker `target` its parts of a group's buffer in this round."""

    def merge(self, group: int, turn: int, item: int) -> None:
        """All parts of the round are here: add them to the group's buffer, or put them in their places."""


class Exchange:
    """The groups of one worker. Items do not mix, whatever the order of arrivals, and sums of several may be on the way
    at once; of one group only one."""

    def __init__(self, groups: Sequence[GroupView], port: PartsPort) -> None:
        self._port = port
        self._rounds = {g.group: g.rounds for g in groups}
        self._at: dict[int, int] = {}  # groups at work: in which round each is
        self._items: dict[int, int] = {}  # for which item
        self._arrived: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
        """The members that have sent, by (item, group, round)."""

    @property
    def busy(self) -> bool:
        return bool(self._at)

    def summed(self, groups: Collection[int]) -> bool:
        """Return whether all that was started of these groups is complete."""
        return self._at.keys().isdisjoint(groups)

    def start(self, item: int, groups: Collection[int]) -> None:
        """This worker's buffers of these groups are filled."""
        assert self.summed(groups), "a group's next sum starts when its last was taken"
        for group in groups:
            self._at[group], self._items[group] = -1, item
            self._next(group)
            self._advance(group)

    def arrived(self, body: PartsArrived) -> None:
        """Parts are here, perhaps for a round or an item that this worker has not come to."""
        self._arrived[body.item, body.group, body.round].add(body.source)
        if body.group in self._at and body.item == self._items[body.group]:
            self._advance(body.group)

    def _advance(self, group: int) -> None:
        while group in self._at:
            number, item = self._at[group], self._items[group]
            due = self._rounds[group][number].receives
            if not self._arrived[item, group, number].issuperset(m.other for m in due):
                return
            del self._arrived[item, group, number]
            if due:
                self._port.merge(group, number, item)
            self._next(group)

    def _next(self, group: int) -> None:
        number = self._at[group] + 1
        if number == len(self._rounds[group]):
            del self._at[group]
            return
        self._at[group] = number
        for message in self._rounds[group][number].sends:
            self._port.send_parts(group, number, message.other, self._items[group])
