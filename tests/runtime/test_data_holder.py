"""A run in which one device alone has the data; and what such a job is refused for."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.job import PlanConfig, prepare
from isthmus.runtime.coordinator.stages import stage_pairs

from .commands import edited, isthmus, refused, write_job
from .jobs import TEXT, final_weights, fleet_of, job_of, plain_run, random_cut, run

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 2}


def test_labels_travel_from_the_holder_and_the_run_equals_the_plain_loop(tmp_path: Path) -> None:
    job = msgspec.structs.replace(
        job_of("gpt", GPT, TEXT, eval_every=1, eval_samples=8), plan=PlanConfig(data_holder="d0")
    )
    prepared = prepare(job)
    boundaries = random_cut(prepared, 3, seed=3, once=False)
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    plan, outcome = run(prepared, boundaries, tmp_path, watcher=watcher)
    assert outcome.outcome == "done"
    for pairs in (p for p in stage_pairs(plan, prepared.captured, clips=False) if p.view.stage):
        assert not pairs.train.columns and not pairs.evaluation.columns
    assert any("labels" in value for edge in plan.replica.edges for value in edge.values if edge.target == 2)
    module, expected = plain_run(job, prepared)
    assert losses == pytest.approx(expected, rel=1e-6)
    own = dict(module.named_parameters())
    for name, value in final_weights(tmp_path).items():
        if name in own:
            torch.testing.assert_close(value, own[name], rtol=1e-5, atol=1e-7)


def test_the_holder_runs_the_first_and_the_last_stage_where_labels_stay(tmp_path: Path) -> None:
    """Its stages share a parameter, and compute one at a time: as the plan has it, also where speeds are emulated."""
    job = msgspec.structs.replace(
        job_of("gpt", GPT | {"tie_embedding": True}, TEXT, eval_every=2, eval_samples=8, save_every=1),
        plan=PlanConfig(data_holder="d0", labels_stay=True),
    )
    prepared, fleet = prepare(job), fleet_of(2, 1e10)
    problem = prepared.problem(fleet)
    assert problem.last_start is not None
    plan = build_plan(problem, ["d0", "d1", "d0"], [5, problem.last_start], planner="test")
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    outcome = run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=True), watcher)
    assert outcome.outcome == "done"
    module, expected = plain_run(job, prepared)
    assert losses == pytest.approx(expected, rel=1e-6)
    saved = final_weights(tmp_path)
    for name, value in module.named_parameters():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-7)
    assert {span.device for span in outcome.spans} == {"d0", "d1"} == set(outcome.peaks)
    computed = sorted((s.start_s, s.end_s) for s in outcome.spans if s.device == "d0" and s.name in ("F", "B", "E"))
    assert len(computed) == 2 * (2 * 4 * 2 + 4)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(computed)), "one at a time"


def with_terms(folder: Path, *lines: str, planner: str = "chain") -> Path:
    job = write_job(folder, fleet="three-sites", planner=planner)
    return edited(job, ("[learning_rate]", "[plan]\n" + "\n".join(lines) + "\n[learning_rate]"))


@pytest.mark.parametrize(
    ("lines", "planner", "words"),
    [
        (('data_holder = "nobody"',), "chain", ["plan.data_holder", "unknown device or region 'nobody'"]),
        (("labels_stay = true",), "chain", ["plan.labels_stay: got true", "plan.data_holder"]),
        (('data_holder = [""]',), "chain", ["plan.data_holder: got an empty name"]),
        (("data_holder = 3",), "chain", ["plan.data_holder"]),
        (('objective = "money"',), "chain", ["plan.objective"]),
        (('data_holders = "a"',), "chain", ["data_holders"]),
        (('objective = "cost"',), "even", ["plan.objective", "'even' cannot minimise", "'auto' or 'chain'"]),
    ],
)
def test_bad_terms(tmp_path: Path, lines: tuple[str, ...], planner: str, words: list[str]) -> None:
    refused(isthmus("plan", with_terms(tmp_path, *lines, planner=planner)), 2, *words)
