"""Nothing that is frozen has moved. See `tests/goldens/__init__.py`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from .files import kernels, read
from .plans import CASES as PROBLEMS
from .plans import PLANNERS, Cost, cost
from .runs import CASES as RUNS
from .runs import Result
from .schedules import CASES as SCHEDULES
from .wire import wire

ROUNDING = 1e-9
"""Of costs: a kernel that sums in another order is still the same."""
OTHER_KERNELS = 1e-4
"""Of losses and weights after a few steps, on a machine whose sums round otherwise."""


def test_the_wires_schema_changes_with_the_protocols_version() -> None:
    found, kept = wire(), read("wire")
    changed = found["messages"] != kept["messages"] or found["types"] != kept["types"]
    raised = found["protocol"] != kept["protocol"]
    assert not (changed and not raised), "a message changed: raise PROTOCOL in runtime/messages/versions.py"
    assert found == kept, "write the new schema: python -m tests.goldens wire"


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("case", PROBLEMS)
def test_no_plan_is_worse(case: int, planner: str) -> None:
    kept, found = msgspec.convert(read("plans")[f"{case} {planner}"], Cost), cost(case, planner)
    assert (found.step_s is None) == (kept.step_s is None)
    if kept.step_s is not None and found.step_s is not None:
        assert found.step_s <= kept.step_s * (1 + ROUNDING)


@pytest.mark.parametrize("name", RUNS)
def test_runs_have_the_same_bits(name: str, tmp_path: Path) -> None:
    everything = read("runs")
    kept, found = msgspec.convert(everything[name], Result), RUNS[name](tmp_path)
    assert found.losses == pytest.approx(kept.losses, rel=OTHER_KERNELS)
    assert found.norm == pytest.approx(kept.norm, rel=OTHER_KERNELS)
    if everything["kernels"] == kernels():
        assert found == kept


def test_every_golden_is_looked_at() -> None:
    assert read("runs").keys() == {"kernels", *RUNS}
    assert read("plans").keys() == {f"{case} {planner}" for case in PROBLEMS for planner in PLANNERS}
    assert read("schedules").keys() == {f"{program} {block}" for program, block in SCHEDULES}
    assert len(read("plans")) == 50
