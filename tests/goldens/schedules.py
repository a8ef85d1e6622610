"""How each of the 2,200 fault schedules ends, by block of 220. `tests/faults/test_schedules.py` compares."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from isthmus.errors import IsthmusError
from tests.faults.schedule import drawn
from tests.faults.simulated import Simulated

BLOCKS, EACH = 10, 220


def simulated(number: int) -> Iterator[Simulated]:
    """The block's runs, each at its end. AssertionError names the schedule that was violated."""
    for seed in range(number * EACH, (number + 1) * EACH):
        run = Simulated(drawn(seed))
        try:
            run.run()
        except (AssertionError, IsthmusError) as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        yield run


def digest(runs: list[Simulated]) -> str:
    """Hash of outcome, reason, steps, end and recoveries of each."""
    ends = (f"{_outcome(run)} {run.end_s!r} {run.recoveries} {run.state_received} {run.recalls}" for run in runs)
    return hashlib.sha256("\n".join(ends).encode()).hexdigest()


def _outcome(run: Simulated) -> str:
    return f"FinishRun(outcome={run.finish.outcome!r}, reason={run.finish.reason!r})"
