"""A device slows down and a link drops in mid-run: the plan follows, nothing is done twice, no false alarm."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest

from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet, FleetChange
from isthmus.job import Prepared, prepare
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan
from isthmus.protocol import Item, adaptation, drift
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.trace import Span
from tests.runtime.jobs import DIGITS, fleet_of, job_of

STEPS, AT = 30, 8
FLOPS_PER_S = 1e7
"""A step takes about 60 ms."""


@cache
def _prepared() -> Prepared:
    return prepare(job_of("mlp", {"layers": 8}, DIGITS, steps=STEPS))


class _Told:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.fleets: list[Fleet] = []
        self.plans: list[Plan] = []


def _run(folder: Path, *changes: FleetChange) -> tuple[Outcome, _Told]:
    prepared, told, fleet = _prepared(), _Told(), fleet_of(2, FLOPS_PER_S)
    runtime = msgspec.convert({"emulate": True, "snapshots": False}, type(prepared.job.runtime))
    job = msgspec.structs.replace(prepared.job, runtime=msgspec.structs.replace(runtime, changes=changes))
    prepared = msgspec.structs.replace(prepared, job=job)

    def replan(believed: Fleet) -> Plan:
        told.fleets.append(believed)
        told.plans.append(make_plan("chain", prepared.problem(believed)))
        return told.plans[-1]

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            told.steps.append(item.step)

    outcome = run_plan(
        prepared,
        replan(fleet),
        fleet,
        folder,
        RunOptions(replan=replan),
        Watcher(advanced=advanced, noted=told.notes.append),
    )
    assert outcome.outcome == "done", (outcome.reason, told.notes)
    assert told.steps == list(range(STEPS)), "each step is done once, in order"
    return outcome, told


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are short here, and so is what is left of the run."""
    monkeypatch.setattr(drift, "LEAST_S", 0.2)
    monkeypatch.setattr(adaptation, "CHANGE_S", 0.05)


@pytest.mark.long
def test_a_device_that_slows_down_gets_less_to_do(tmp_path: Path) -> None:
    outcome, told = _run(tmp_path, FleetChange(step=AT, factor=0.2, device="d0"))
    assert outcome.recoveries, told.notes
    assert all(r.redone == 0 and not r.from_checkpoint for r in outcome.recoveries)
    assert outcome.recoveries[0].step > AT
    assert told.fleets[-1].device("d0").sustained_flops_per_s < 0.3 * FLOPS_PER_S
    before, after = (
        sum(s.flops_forward for s in p.stages if s.device == "d0") for p in (told.plans[0], told.plans[-1])
    )
    assert after < before / 2


@pytest.mark.long
def test_a_plan_stays_where_a_change_costs_more_than_is_left_to_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "CHANGE_S", 1e6)
    outcome, told = _run(tmp_path, FleetChange(step=AT, factor=0.2, device="d0"))
    assert any(note.startswith("d0 computes at") for note in told.notes)
    assert len(told.plans) > 1 and not outcome.recoveries, told.notes


def test_a_change_of_what_the_fleet_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="d9"):
        _run(tmp_path, FleetChange(step=AT, factor=0.1, device="d9"))
