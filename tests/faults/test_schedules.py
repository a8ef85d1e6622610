"""Thousands of runs in which things go wrong. `python -m tests.faults SEED` runs one of them again.

`make test` has every fifth block of schedules, `make test-long` all.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.goldens.files import read
from tests.goldens.schedules import BLOCKS, EACH, digest, simulated
from tests.tiers import THOROUGH

from .schedule import drawn
from .simulated import Simulated

pytestmark = pytest.mark.thorough

EVERY = 1 if THOROUGH else 5


@pytest.mark.parametrize("block", range(0, BLOCKS, EVERY))
def test_one_line_nothing_twice_nothing_acknowledged_lost(block: int) -> None:
    runs = list(simulated(block))
    outcomes = Counter(run.finish.outcome for run in runs)
    recoveries = sum(run.recoveries for run in runs)
    state_received = sum(run.state_received > 0 for run in runs)
    recalled = sum(run.recalls > 0 for run in runs)
    assert outcomes["done"] > EACH * 0.8, outcomes  # the others: no device was left, or no plan
    assert recoveries > EACH / 2, "the schedules must do harm"
    assert recalled, "sometimes too few must be left"
    assert state_received > EACH / 20, "joining devices must come while the others train"
    assert digest(runs) == read("schedules")[str(block)], "python -m tests.goldens schedules, if this is meant"


def test_a_seed_is_replayed_to_the_letter() -> None:
    first, again = Simulated(drawn(7)), Simulated(drawn(7))
    assert first.run() == again.run() and first.result == again.result
