"""Device processes on different hardware: the CPU beside accelerators, memory that is short, a driver that fails."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from isthmus.api.make_plan import plan_for
from isthmus.cost import build_plan
from isthmus.errors import FleetTooSmall
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.job import Job, prepare
from isthmus.protocol import Item
from isthmus.report import memory_use
from isthmus.runtime.coordinator.backend import LocalBackend, local_places
from isthmus.runtime.coordinator.run_callbacks import Outcome
from tests.runtime.jobs import DIGITS, final_weights, fleet_of, job_of, plain_run, random_cut

WIDE = {"width": 512, "layers": 2}
"""A layer in the middle takes 3 MiB, with its gradients and momenta."""


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment for all: its fork server is kept."""
    monkeypatch.setenv("ISTHMUS_CHECKED_MEMORY", "256MiB,3MiB@1,1MiB@2")
    monkeypatch.setenv("ISTHMUS_CHECKED_FAULT", "after:150@3")


def _trained(job: Job, folder: Path, *devices: str) -> tuple[Outcome, list[float], list[str]]:
    """Each device on its accelerator; a new plan is the planner's."""
    prepared = prepare(job)
    fleet = fleet_of(len(devices))
    plan = build_plan(prepared.problem(fleet), fleet.names, random_cut(prepared, len(devices), 0), planner="test")
    places = local_places(dict(zip(fleet.names, devices, strict=True)), fleet.names)
    losses: dict[int, float] = {}
    notes: list[str] = []

    def advanced(item: Item, loss: float | None, spans: object) -> None:
        if loss is not None:
            losses[item.step] = loss

    options = RunOptions(emulate=False, backend=LocalBackend(places=places), replan=partial(plan_for, prepared))
    outcome = run_plan(prepared, plan, fleet, folder, options, Watcher(advanced=advanced, noted=notes.append))
    return outcome, [losses[step] for step in sorted(losses)], notes


def _equals_the_plain_loop(job: Job, folder: Path, losses: list[float]) -> None:
    module, expected = plain_run(job, prepare(job))
    assert losses == pytest.approx(expected, rel=1e-6)
    saved = final_weights(folder)
    for name, value in module.named_parameters():
        assert torch.allclose(saved[name], value, rtol=1e-6, atol=1e-7), name


def test_the_cpu_and_an_accelerator_train_one_model(tmp_path: Path) -> None:
    job = job_of("mlp", {}, DIGITS)
    outcome, losses, _ = _trained(job, tmp_path, "cpu", "checked:0", "cpu")
    assert outcome.outcome == "done" and not outcome.recoveries, outcome.reason
    _equals_the_plain_loop(job, tmp_path, losses)
    first, middle, last = memory_use(outcome.periods[-1].plan, outcome.peaks)
    assert (first.resident, middle.resident, last.resident) == (True, False, True)
    assert middle.peak_bytes >= middle.predicted_bytes > 0


def test_memory_that_is_short_leads_to_a_plan_that_fits(tmp_path: Path) -> None:
    job = job_of("mlp", WIDE, DIGITS)
    outcome, losses, notes = _trained(job, tmp_path, "checked:1", "checked:0")
    assert outcome.outcome == "done" and outcome.recoveries, outcome.reason
    assert any("'d0': out of memory on checked:1 in stage 0" in note and "of 3 MiB free" in note for note in notes)
    assert any(note.startswith("d0: ") and "plans count on" in note for note in notes)
    last = outcome.periods[-1]
    assert last.fleet.device("d0").memory_bytes <= 3 << 20
    assert sum(s.memory.total for r in last.plan.replicas for s in r.stages if s.device == "d0") <= 3 << 20
    _equals_the_plain_loop(job, tmp_path, losses)


def test_where_no_plan_fits_the_run_ends_with_the_figures(tmp_path: Path) -> None:
    with pytest.raises(FleetTooSmall, match=r"out of memory on checked:2 in stage 0.* asked for .*; no plan for what"):
        _trained(job_of("mlp", WIDE, DIGITS), tmp_path, "checked:2")


def test_a_driver_that_fails_costs_the_run_that_device(tmp_path: Path) -> None:
    job = job_of("mlp", {}, DIGITS, steps=4)
    outcome, losses, notes = _trained(job, tmp_path, "checked:3", "cpu")
    assert outcome.outcome == "done", outcome.reason
    assert any("'d0' was lost: AcceleratorError: checked:3: " in note for note in notes), notes
    assert outcome.periods[-1].plan.devices == ("d1",)
    _equals_the_plain_loop(job, tmp_path, losses)
    log = (tmp_path / "logs" / "d0.log").read_text()
    assert log.startswith("device d0: checked:3 failed: ") and "Traceback" not in log
