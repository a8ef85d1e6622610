"""Which devices are lost when, and for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence

from isthmus.simulator import Fault

LOST_PER_HOUR = 0.2
"""Of each device."""
AWAY_S = (60.0, 600.0)
"""A lost device is back after at least and at most so long."""


def drawn(names: Sequence[str], seconds: float, seed: int) -> tuple[Fault, ...]:
    """Each device is lost at random, comes back, and may be lost again."""
    draws, found = random.Random(seed), list[Fault]()
    for name in names:
        time_s = draws.expovariate(LOST_PER_HOUR) * 3600
        while time_s < seconds:
            away_s = draws.uniform(*AWAY_S)
            found.append(Fault(kind="lost", device=name, time_s=time_s, lasts_s=away_s))
            time_s += away_s + draws.expovariate(LOST_PER_HOUR) * 3600
    return tuple(sorted(found, key=lambda fault: fault.time_s))
