"""Runs whose weight gradients are apart: the bits of 1F1B, all of whose work is done, through a lost device too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan, run_spec
from isthmus.graph import cuts
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan, load_plan, save_plan
from isthmus.protocol import RunSpec
from isthmus.simulator import SimulationOptions, simulate_run
from isthmus.trace import Span
from tests.tiers import represented_by

from .jobs import RESNET, TEXT, final_weights, fleet_of, images, job_of, plain_run
from .test_what_leaves import ThreadCrew

GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 4, "heads": 2}
CASES: dict[str, tuple[str, dict[str, object], Callable[[Path], DataSpec], bool]] = {
    "gpt": ("gpt", {**GPT, "dropout": 0.1, "tie_embedding": True}, lambda _: TEXT, False),
    "resnet": ("hf-resnet", RESNET, images, True),
}
"""Model, options, data, and whether the plain module gives the same bits: no dropout, no parameter in two stages."""
STAGES = 3


def cut_for(prepared: Prepared) -> tuple[Plan, Plan]:
    """The same stages under 1F1B and with weight gradients apart."""
    problem = prepared.problem(fleet_of(STAGES))
    legal = cuts(problem.flow)
    fewest = min(len(cut.values) for cut in legal)
    narrow = [cut.position for cut in legal if len(cut.values) == fewest]
    boundaries = [narrow[len(narrow) * k // STAGES] for k in range(1, STAGES)]
    whole, apart = (
        build_plan(replace(problem, schedule=schedule), problem.fleet.names, boundaries, planner="test")
        for schedule in ("1f1b", "zero-bubble")
    )
    return whole, apart


def trained(
    prepared: Prepared, plan: Plan, folder: Path
) -> tuple[list[float | None], dict[str, torch.Tensor], list[Span]]:
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    options = RunOptions(emulate=False, backend=ThreadCrew())
    outcome = run_plan(prepared, plan, fleet_of(STAGES), folder, options, watcher)
    assert outcome.outcome == "done"
    return losses, final_weights(folder), list(outcome.spans)


def work_of(spans: list[Span]) -> Counter[tuple[str, str, int, int]]:
    return Counter((s.device, s.name, s.step, s.micro_batch) for s in spans if s.name in ("F", "B", "W", "E"))


@pytest.mark.parametrize("name", represented_by(CASES, "resnet"))
def test_a_run_has_the_bits_of_1f1b_and_does_what_the_simulator_does(name: str, tmp_path: Path) -> None:
    model, options, data, plain = CASES[name]
    job = job_of(model, options, data(tmp_path), clip_norm=1.0, eval_every=2, eval_samples=4)
    prepared = prepare(job)
    whole, apart = cut_for(prepared)
    save_plan(apart, tmp_path / "plan.json")
    apart = load_plan(tmp_path / "plan.json")
    assert [w > 0 for w in apart.replica.weight_flops] == [False, True, True]
    assert apart.replica.weight_flops < tuple(stage.flops_backward for stage in apart.stages)

    losses, weights, spans = trained(prepared, apart, tmp_path / "apart")
    expected_losses, expected, _ = trained(prepared, whole, tmp_path / "whole")
    assert losses == expected_losses
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(weights[key], value), key
    if plain:
        _, plain_losses = plain_run(job, prepared)
        assert losses == plain_losses

    counts = prepared.captured.train.count is not None
    simulated = simulate_run(apart, fleet_of(STAGES), run_spec(prepared), SimulationOptions(clips=True, counts=counts))
    assert work_of(list(simulated.trace.spans)) == work_of(spans)
    assert sum(s.name == "W" for s in spans) == 2 * job.training.micro_batches * job.training.steps


def test_what_a_plan_may_not_say() -> None:
    _, plan = cut_for(prepare(job_of("gpt", GPT, TEXT)))
    (replica,) = plan.replicas
    for wrong in ((1,), (0, 1, 1 << 60)):
        schedule = msgspec.structs.replace(replica.schedule, weight_flops=wrong)
        edited = msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, schedule=schedule),))
        with pytest.raises(UserError, match="weight_flops"):
            simulate_run(edited, fleet_of(STAGES), RunSpec(steps=1, micro_batches=4, micro_batch_size=2))
