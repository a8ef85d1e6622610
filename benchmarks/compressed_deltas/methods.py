"""What is compared, with the rates that are tried for each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from replica import Method

from isthmus.plans import Packing

STEPS, START = 900, 450


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One way to exchange what was learnt, and rates to choose from."""

    candidates: list[Method]
    start: int = START
    """Gradients are averaged in each step before."""
    workers: int = 2


def deltas(period: int, ratio: float, rates: Sequence[tuple[float, float, float]], decay: float = 1.0) -> list[Method]:
    """`rates`: inner rate, outer rate, outer momentum. A ratio of 0 for deltas that are not packed."""
    packing = Packing(codec="sparse2bit", ratio=ratio) if ratio else None
    return [
        Method(
            period=period,
            packing=packing,
            rate=rate,
            outer_rate=outer_rate,
            outer_momentum=momentum,
            error_decay=decay,
        )
        for rate, outer_rate, momentum in rates
    ]


COMPARED = [
    Compared(candidates=[Method(period=1, rate=rate) for rate in (0.048, 0.032, 0.064)]),
    Compared(candidates=deltas(15, 2, [(0.032, 0.8, 0.5), (0.032, 1, 0), (0.048, 0.8, 0.5), (0.024, 0.8, 0.6)])),
    Compared(candidates=deltas(15, 2, [(0.032, 0.8, 0.5)], decay=0.95)),
    Compared(candidates=deltas(15, 0, [(0.032, 0.8, 0.5)])),
    Compared(candidates=deltas(6, 8, [(0.032, 0.8, 0.5), (0.032, 1, 0)])),
    Compared(
        candidates=deltas(30, 2, [(0.032, 0.8, 0.5), (0.048, 0.8, 0.5), (0.024, 1, 0.7), (0.016, 1, 0.7)]), workers=4
    ),
    Compared(
        candidates=deltas(15, 2, [(0.032, 0.8, 0.5), (0.048, 0.8, 0.5), (0.064, 0.8, 0.5), (0.064, 0.6, 0.5)]), start=0
    ),
]
"""The first is what the others are measured by."""
