"""Interleaved plans: each device has several stages of the pipeline that are no neighbours, as in virtual stages."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan, run_spec
from isthmus.graph import cuts
from isthmus.job import prepare
from isthmus.plans import load_plan, save_plan
from isthmus.simulator import SimulationOptions, simulate_run
from tests.tiers import represented_by

from .jobs import final_weights, fleet_of, job_of, plain_run
from .test_u_shaped import CASES
from .test_what_leaves import ThreadCrew


@pytest.mark.parametrize(
    ("name", "devices", "passes"), represented_by([("gpt", 2, 2), ("gpt", 3, 2), ("bert", 2, 3)], ("bert", 2, 3))
)
def test_an_interleaved_run_equals_the_plain_module(name: str, devices: int, passes: int, tmp_path: Path) -> None:
    """Stages end where one activation passes, so that sums have eager autograd's order."""
    model, options, data = CASES[name]
    job = job_of(model, options, data(tmp_path), eval_every=2, eval_samples=4)
    prepared, fleet = prepare(job), fleet_of(devices)
    problem, stages = prepared.problem(fleet), devices * passes
    legal = cuts(problem.flow)
    fewest = min(len(cut.values) for cut in legal)
    narrow = [cut.position for cut in legal if len(cut.values) == fewest]
    boundaries = [narrow[len(narrow) * k // stages] for k in range(1, stages)]
    save_plan(build_plan(problem, fleet.names * passes, boundaries, planner="test"), tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    outcome = run_plan(
        prepared, plan, fleet, tmp_path / "run", RunOptions(emulate=False, backend=ThreadCrew()), watcher
    )
    assert outcome.outcome == "done"
    module, expected = plain_run(job, prepared)
    assert losses == expected
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for weight, value in final_weights(tmp_path / "run").items():
        if not weight.startswith("optimizer."):
            assert torch.equal(value, own[weight]), weight
    simulated = simulate_run(plan, fleet, run_spec(prepared), SimulationOptions())
    assert simulated.finish.outcome == "done"
    for spans in (outcome.spans, simulated.trace.spans):
        for device in fleet.names:
            work = sorted((s.start_s, s.end_s) for s in spans if s.device == device and s.name in ("F", "B", "E"))
            assert len(work) == passes * (2 * 4 * 2 + 2)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(work)), "one at a time"
