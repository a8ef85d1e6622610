"""Pipelines whose plans are drawn, whatever strikes devices and coordinator (`simulated.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .schedule import drawn
from .simulated import Simulated


def drawn_run(seed: int) -> Simulated:
    run = Simulated(drawn(seed))
    run.run()
    return run


def check_harm(runs: Sequence[Simulated]) -> None:
    outcomes = Counter(run.finish.outcome for run in runs)
    assert outcomes["done"] > len(runs) * 0.8, outcomes  # the others: no device was left, or no plan
    assert sum(run.recoveries for run in runs) > len(runs) / 2
    assert any(run.recalls for run in runs), "sometimes too few must be left"
    received = sum(run.state_received > 0 for run in runs)
    assert received > len(runs) / 20, "joining devices must come while the others train"


def line(run: Simulated) -> str:
    """Outcome, reason, end and recoveries."""
    outcome = f"FinishRun(outcome={run.finish.outcome!r}, reason={run.finish.reason!r})"
    return f"{outcome} {run.end_s!r} {run.recoveries} {run.state_received} {run.recalls}"
