"""How the members of a group sum a buffer: rounds of messages, the same for the simulator, the cost model and the run.

A buffer is cut into equal parts. In a round a member sends parts to others and waits for parts of others, which it
adds to its own or takes in place of them. The rounds of one member follow one another; members are held together by
what they wait for alone. Every part is summed once and then copied, so all members end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from isthmus.errors import UserError
from isthmus.wire_types import Many, Place


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Which rounds. Members are counted in the order of their group."""

    kind: Literal["sharded", "ring", "hierarchical"] = "sharded"
    """`sharded`: each member sums one part and hands it out (DT-FM Eq. 2: a sharded parameter server).
    `ring`: parts travel around once to be summed and once more to be known (n - 1 rounds each).
    `hierarchical`: an island's members send all to its first, the first of all islands share out the sum, and hand it
    on inside."""
    islands: tuple[tuple[Place, ...], ...] = ()
    """`ring`: one tuple, the members in the order of the ring. `hierarchical`: each island's members."""


class Parts(msgspec.Struct, frozen=True):
    """Parts `first` .. `last` - 1 of a buffer that is cut into `of`."""

    first: Place
    last: Place
    of: Place

    def span(self, elements: int) -> tuple[int, int]:
        """The elements that these parts are, of a buffer of so many."""
        return elements * self.first // self.of, elements * self.last // self.of

    def count(self, elements: int) -> int:
        first, last = self.span(elements)
        return last - first


class CollectiveMessage(msgspec.Struct, frozen=True):
    other: Place  # to whom, or from whom
    parts: Parts


class Round(msgspec.Struct, frozen=True, kw_only=True):
    sends: Many[CollectiveMessage] = ()
    receives: Many[CollectiveMessage] = ()
    adds: bool = False  # whether arriving values are added, in the order of the senders; else they replace


def rounds(collective: Collective, members: int) -> list[tuple[Round, ...]]:
    """The rounds of each of so many members; as many for all. UserError for a ring or islands of other members."""
    if members < 2:
        return [()] * members
    listed = sorted(m for island in collective.islands for m in island)
    if collective.kind == "sharded":
        return _sharded(list(range(members)), members)
    if listed != list(range(members)) or not all(collective.islands):
        raise UserError(
            f"plan: sync: collective {collective.kind!r}: islands: got {list(map(list, collective.islands))}, "
            f"expected each of the members 0..{members - 1} once"
        )
    return _ring(collective.islands[0]) if collective.kind == "ring" else _hierarchical(collective.islands, members)


def _sharded(of: Sequence[int], members: int) -> list[tuple[Round, ...]]:
    """Among some of the members; the others have two empty rounds."""
    count = len(of)
    found = [(Round(), Round())] * members
    for place, me in enumerate(of):
        mine = Parts(place, place + 1, count)
        others = [(p, m) for p, m in enumerate(of) if m != me]
        theirs = tuple(CollectiveMessage(m, Parts(p, p + 1, count)) for p, m in others)
        own = tuple(CollectiveMessage(m, mine) for _, m in others)
        found[me] = (
            Round(sends=theirs, receives=own, adds=True),
            Round(sends=own, receives=theirs),
        )
    return found


def _ring(order: Sequence[int]) -> list[tuple[Round, ...]]:
    count = len(order)
    found: list[tuple[Round, ...]] = [()] * count
    for place, me in enumerate(order):
        after, before = order[(place + 1) % count], order[place - 1]

        def part(number: int) -> Parts:
            return Parts(number % count, number % count + 1, count)

        found[me] = tuple(
            Round(
                sends=(CollectiveMessage(after, part(place - step)),),
                receives=(CollectiveMessage(before, part(place - step - 1)),),
                adds=step < count - 1,
            )
            for step in range(2 * (count - 1))
        )
    return found


def _hierarchical(islands: Sequence[Sequence[int]], members: int) -> list[tuple[Round, ...]]:
    whole = Parts(0, 1, 1)
    found = _sharded([island[0] for island in islands], members)
    for first, *rest in islands:
        inside = tuple(CollectiveMessage(m, whole) for m in rest)
        found[first] = (Round(receives=inside, adds=True), *found[first], Round(sends=inside))
        up = (CollectiveMessage(first, whole),)
        for member in rest:
            found[member] = (Round(sends=up), Round(), Round(), Round(receives=up))
    return found
