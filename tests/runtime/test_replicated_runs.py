"""Several replicas over processes equal one plain model with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import PlanLayout, SyncPolicy, build_replicas
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared, prepare
from isthmus.planners import scheduled
from isthmus.plans import Collective, Plan
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.training.checkpoint import latest_checkpoint, split_replica
from isthmus.training.optim import OptimizerConfig
from tests.tiers import represented_by

from .jobs import RESNET, TEXT, final_weights, fleet_of, images, job_of, plain_run

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 3, "heads": 2, "tie_embedding": True}


def layouts(prepared: Prepared, shapes: Sequence[tuple[Sequence[float], int]]) -> list[PlanLayout]:
    """One replica for each (where it is cut, of the whole; its micro-batches), on devices of its own."""
    legal = [c.position for c in cuts(Flow(prepared.captured.train))]
    found: list[PlanLayout] = []
    devices = iter(fleet_of(sum(len(ends) + 1 for ends, _ in shapes)).names)
    for ends, share in shapes:
        boundaries = tuple(legal[int(end * len(legal))] for end in ends)
        found.append(PlanLayout(tuple(next(devices) for _ in range(len(ends) + 1)), boundaries, share))
    return found


def planned(prepared: Prepared, shapes: Sequence[tuple[Sequence[float], int]]) -> Plan:
    found = layouts(prepared, shapes)
    return build_replicas(prepared.problem(fleet_of(sum(len(x.order) for x in found))), found, planner="test")


def run(prepared: Prepared, plan: Plan, folder: Path, options: RunOptions | None = None) -> tuple[Outcome, list[float]]:
    losses: list[float] = []

    def advanced(item: object, loss: float | None, spans: object) -> None:
        if getattr(item, "kind", "") == "train":
            assert loss is not None
            losses.append(loss)

    fleet = fleet_of(len(plan.devices))
    options = options or RunOptions(emulate=False)
    outcome = run_plan(prepared, plan, fleet, folder, options, Watcher(advanced=advanced))
    assert outcome.outcome == "done"
    return outcome, losses


def assert_plain(job: Job, prepared: Prepared, folder: Path, losses: list[float]) -> None:
    module, expected = plain_run(job, prepared)
    own = dict(module.named_parameters(remove_duplicate=False))
    saved = final_weights(folder)
    for name, value in own.items():
        if name in saved:
            error = (saved[name].double() - value.double()).norm()
            assert error <= 1e-6 * value.double().norm().clamp(min=1e-6), name
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "shapes, kind",
    [
        pytest.param([((0.4,), 2), ((0.4,), 2)], "sharded", marks=pytest.mark.long),
        ([((0.3, 0.7), 1), ((0.5,), 2), ((), 1)], "ring"),
        pytest.param([((), 2), ((0.6,), 1), ((), 1)], "hierarchical", marks=pytest.mark.long),
    ],
    ids=["cut alike", "cut differently, in rings, steps that overlap", "islands"],
)
def test_replicas_equal_the_plain_loop(
    shapes: Sequence[tuple[Sequence[float], int]], kind: str, tmp_path: Path
) -> None:
    job = job_of("gpt", GPT, TEXT, clip_norm=1.0, steps=3)
    job = msgspec.structs.replace(job, schedule="delayed" if kind == "ring" else "1f1b")
    prepared = prepare(job)
    plan = planned(prepared, shapes)
    members = range(len(shapes))
    islands = {"sharded": (), "ring": (tuple(members),), "hierarchical": ((0, 1), tuple(members)[2:])}[kind]
    collective = Collective(kind=kind, islands=islands)  # type: ignore[arg-type]
    groups = tuple(msgspec.structs.replace(g, collective=collective) for g in plan.sync.groups)
    plan = msgspec.structs.replace(plan, sync=msgspec.structs.replace(plan.sync, groups=groups))
    outcome, losses = run(prepared, plan, tmp_path)
    assert_plain(job, prepared, tmp_path, losses)
    sums = [s for s in outcome.spans if s.track == "send" and s.name == "average"]
    expected = 2 * (len(shapes) - 1) * sum(g.size_bytes for g in plan.sync.groups)
    assert sum(s.size_bytes for s in sums) == job.training.steps * expected


ONCE_A_STEP = [
    SyncPolicy(mode="local"),
    SyncPolicy(mode="partial"),
    SyncPolicy(mode="dream"),
    SyncPolicy(mode="dreamddp"),
    SyncPolicy(mode="outer", outer_rate=1.0, outer_momentum=0.0),
    SyncPolicy(mode="streaming", outer_rate=1.0, outer_momentum=0.0, delay=0, mixing=0.0),
]


def test_a_plan_of_one_replica_says_that_it_averages_nothing() -> None:
    job = job_of("gpt", GPT, TEXT)
    words = "sync.mode 'local' averages nothing: this plan has one replica"
    for mode, said in (("every-step", ()), ("local", (words,))):
        prepared = prepare(msgspec.structs.replace(job, sync=SyncPolicy(mode=mode)))
        made = planned(prepared, [((0.5,), 4)])
        problem = prepared.problem(fleet_of(2))
        again = scheduled(problem, scheduled(problem, made))
        assert again.notes == (*made.notes, *said)


@pytest.mark.parametrize("policy", represented_by(ONCE_A_STEP, ONCE_A_STEP[-1]), ids=lambda policy: policy.mode)
def test_parameters_averaged_in_every_step_equal_gradients_summed(policy: SyncPolicy, tmp_path: Path) -> None:
    """With plain SGD, averages of parameters after one step are the parameters after a step on the mean gradient."""
    job = job_of("gpt", GPT, TEXT)
    job = msgspec.structs.replace(job, sync=policy, optimizer=(OptimizerConfig(name="sgd", lr=0.1),))
    prepared = prepare(job)
    plan = scheduled(prepared.problem(fleet_of(3)), planned(prepared, [((0.5,), 1), ((), 3)]))
    assert plan.sync.averages == ("parameters" if policy.outer is None else "deltas")
    _, losses = run(prepared, plan, tmp_path)
    assert_plain(job, prepared, tmp_path, losses)


def test_a_period_sends_each_parameter_once_and_ends_with_equal_replicas(tmp_path: Path) -> None:
    job = job_of("gpt", GPT, TEXT, steps=4, save_every=4)
    job = msgspec.structs.replace(job, sync=SyncPolicy(mode="partial", period=2))
    prepared = prepare(job)
    plan = planned(prepared, [((0.5,), 2), ((0.4,), 2)])
    outcome, _ = run(prepared, plan, tmp_path)
    sums = [s for s in outcome.spans if s.track == "send" and s.name == "average"]
    for step in range(4):
        due = sum(2 * g.size_bytes for g in plan.sync.groups if step % 2 in g.iterations)
        assert sum(s.size_bytes for s in sums if s.step == step) == due
    saved = final_weights(tmp_path)
    second = {name for name in saved if split_replica(name)[0] == 1}
    assert {split_replica(name)[1] for name in second} == saved.keys() - second
    # What was averaged in the period's first step has gone ways of its own since.
    last = {prepared.flow.by_name[p].target for g in plan.sync.groups if 1 in g.iterations for p in g.parameters}
    same = {split_replica(n)[1] for n in second if torch.equal(saved[n], saved[split_replica(n)[1]])}
    assert last <= same
    assert any(name not in same for name in saved.keys() - second)


POLICIES = [
    SyncPolicy(),
    SyncPolicy(mode="partial", period=4),
    SyncPolicy(mode="outer", period=4),
    SyncPolicy(mode="streaming", period=2, delay=1),
]


@pytest.mark.parametrize(
    "policy",
    represented_by(POLICIES, POLICIES[-1]),
    ids=["every step", "partial", "outer", "an exchange under way"],
)
def test_resumed_in_the_middle_of_a_period(policy: SyncPolicy, tmp_path: Path) -> None:
    """Weights, optimizer state and buffers of each replica: the same bits as a run that was not interrupted."""
    job = job_of("hf-resnet", RESNET, images(tmp_path), steps=4, save_every=2)
    job = msgspec.structs.replace(job, sync=policy)
    prepared = prepare(job)
    plan = planned(prepared, [((0.5,), 2), ((), 2)])
    run(prepared, plan, tmp_path / "whole")
    half = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=2))
    run(msgspec.structs.replace(prepared, job=half), plan, tmp_path / "parts")
    found = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    run(prepared, plan, tmp_path / "parts", RunOptions(emulate=False, resume_from=found))
    whole, parts = final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts")
    assert whole.keys() == parts.keys() and any(split_replica(name)[0] for name in whole)
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
