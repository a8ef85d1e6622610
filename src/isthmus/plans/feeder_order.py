"""Whose turn it is, where several holders feed one chain: a micro-batch is of one holder, in proportion to its samples.

Turn j of a holder with w samples, j = 0, 1, ..., is due at (2 j + 1) / w; turns come in the order in which they are
due, of several at once the first holder's first. So after any number of turns each holder has had its share of them but
for a rounding (Webster's method), all devices know it from the counts alone, and no sequence is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from isthmus.errors import InternalError


class FeederSlot(NamedTuple):
    holder: int
    number: int
    """Of the holder's turns, from 0."""


@lru_cache(maxsize=4096)
def feeder_slot(samples: tuple[int, ...], number: int) -> FeederSlot:
    """The turn with this number, from 0. Who has no samples has none. Costs no walk from turn 0."""
    had = list(had_before(samples, number))
    holder = _next(samples, had)
    return FeederSlot(holder, had[holder])


def whole(counts: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The whole micro-batches of each holder's samples."""
    return tuple(count // size for count in counts)


def had_before(samples: Sequence[int], number: int) -> list[int]:
    """How many of the first `number` turns each holder has."""
    total, holders = sum(samples), len(samples)
    if not total:
        raise InternalError("turns of holders none of whom has a sample")
    # All turns due by (2 number - holders) / total: these are `number` at most, and fewer by one a holder at most.
    had = [max(0, ((2 * number - holders) * count + total) // (2 * total)) for count in samples]
    while sum(had) < number:
        had[_next(samples, had)] += 1
    return had


def _next(samples: Sequence[int], had: Sequence[int]) -> int:
    best = -1
    for holder, count in enumerate(samples):
        if count and (best < 0 or (2 * had[holder] + 1) * samples[best] < (2 * had[best] + 1) * count):
            best = holder
    return best
