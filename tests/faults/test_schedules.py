"""Thousands of runs of each program in which things go wrong. `python -m tests.faults SEED` runs a pipeline's again.

`make test` has the first block of each program's schedules, `make test-long` all. That faults do harm is counted in the
first block: its runs are always the same, and another block may be lucky.
"""

from __future__ import annotations

import pytest

from tests.goldens.files import read
from tests.goldens.schedules import CASES, PROGRAMS, digest, simulated
from tests.tiers import represented_by

KEPT = [(program, 0) for program in PROGRAMS]


@pytest.mark.parametrize(("program", "block"), represented_by(CASES, *KEPT))
def test_a_run_ends_and_what_it_does_counts_once(program: str, block: int) -> None:
    runs = list(simulated(program, block))
    if (program, block) in KEPT:
        PROGRAMS[program].check_harm(runs)
    kept = read("schedules")[f"{program} {block}"]
    assert digest(program, runs) == kept, "python -m tests.goldens schedules, if this is meant"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_seed_is_replayed_to_the_letter(program: str) -> None:
    found = PROGRAMS[program]
    assert [found.line(found.drawn(seed)) for seed in range(10)] == [
        found.line(found.drawn(seed)) for seed in range(10)
    ]
