"""Thousands of runs in which things go wrong. `python -m tests.faults SEED` runs one of them again."""

from __future__ import annotations

from collections import Counter

import pytest

from .schedule import drawn
from .simulated import Simulated

BLOCKS, EACH = 10, 220


@pytest.mark.parametrize("block", range(BLOCKS))
def test_one_line_nothing_twice_nothing_acknowledged_lost(block: int) -> None:
    outcomes: Counter[str] = Counter()
    recoveries = state_received = recalled = 0
    for seed in range(block * EACH, (block + 1) * EACH):
        run = Simulated(drawn(seed))
        try:
            outcomes[run.run().outcome] += 1
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        recoveries += run.recoveries
        state_received += run.state_received > 0
        recalled += run.recalls > 0
    assert outcomes["done"] > EACH * 0.8, outcomes  # the others: no device was left, or no plan
    assert recoveries > EACH / 2, "the schedules must do harm"
    assert recalled, "sometimes too few must be left"
    assert state_received > EACH / 20, "joining devices must come while the others train"


def test_a_seed_is_replayed_to_the_letter() -> None:
    first, again = Simulated(drawn(7)), Simulated(drawn(7))
    assert (first.run(), first.clock.now_s) == (again.run(), again.clock.now_s)
