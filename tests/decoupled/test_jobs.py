"""Jobs with `[sync] mode = "decoupled"`: trained, simulated, and refused in a line."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.api.decoupled import _Watch, overruns, plan_replicas, replica_plans, simulate_decoupled, step_times
from isthmus.api.folder import RunFolder
from isthmus.api.observer import Silent
from isthmus.api.stored_run import Uploads
from isthmus.api.terminal import logged
from isthmus.api.watch import Watch
from isthmus.callbacks import Callbacks
from isthmus.cost import PlanLayout, SyncPolicy, build_replicas
from isthmus.data import DataSpec, load_dataset
from isthmus.errors import Diverged, UserError
from isthmus.fleet import resolve_fleet
from isthmus.job import Job, RuntimeConfig, TrainingConfig, fleet_of, prepare
from isthmus.models import ModelSpec, build_model
from isthmus.models.registry import give_model
from isthmus.programs.merging import Finish
from isthmus.runtime.decoupled.merged_run import DecoupledOutcome, MergedRun, evaluated, merges_file
from isthmus.runtime.decoupled.merger import MergeTraffic
from isthmus.runtime.decoupled.run import check_decoupled
from isthmus.simulator import Fault
from isthmus.training.checkpoint import latest_checkpoint, read_manifest
from isthmus.training.decoupled import fragments_of
from isthmus_testing.decoupled_replay import replay
from isthmus_testing.replica_trainer import ReplicaTrainer
from tests.runtime.commands import isthmus as isthmus_command
from tests.runtime.commands import refused

from .small import PAIR, job_of

FLEET = PAIR.format(100, 200)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "fleet.toml").write_text(FLEET)
    found = job_of()
    training = msgspec.structs.replace(found.training, micro_batches=2, eval_every=20, eval_samples=64)
    fleet = str(tmp_path / "fleet.toml")
    return msgspec.structs.replace(found, fleet=fleet, run_dir=str(tmp_path / "runs"), training=training)


def test_a_job_leaves_the_merged_model_and_a_record_that_gives_its_bits(job: Job) -> None:
    shown = io.StringIO()
    run = isthmus.train(job, observer=logged(shown))
    assert run.outcome == "done"
    assert run.losses[-1].step == 40
    lines = shown.getvalue().splitlines()
    assert any(line.startswith("step 40/40, loss ") and line.endswith(" samples/s") for line in lines)
    assert f"step 40: held-out loss {run.heldout[-1].loss:.4f}" in lines
    (end,) = (line for line in lines if " samples in " in line and line[0].isdigit())
    more = int(end.split()[0].replace(",", "")) - 40 * job.training.batch_size
    assert more == 0 or end.endswith(f", {more:,} more than asked: replicas train on until the last merge")
    assert [point.step >= at for point, at in zip(run.heldout, (20, 40), strict=True)] == [True, True]
    module = build_model(job.model)
    assert run.load(module) == 40
    merges = [line.merge for line in merges_file(run.path).lines()]
    names = resolve_fleet(job.fleet).names
    heldout = load_dataset(job.data, "heldout")
    assert run.heldout[-1].loss == evaluated(module, heldout, 64, job.training.batch_size)[0]
    again, expected = build_model(job.model), replay(job, load_dataset(job.used_data, "train"), names, merges)
    expected.fill(fragments_of(again, 2))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


class Masked(nn.Module):
    """A mean of its own, over labels of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept, labels = (labels.flatten() >= 0).float(), labels.flatten()
        each = nn.functional.cross_entropy(self.head(self.embed(x)).flatten(0, 1), labels, reduction="none")
        return (each * kept).sum() / kept.sum()


def test_a_replica_has_one_micro_batch_where_a_mean_is_the_models_own(job: Job, tmp_path: Path) -> None:
    x = torch.arange(40).reshape(8, 5) % 8
    labels = torch.full((8, 5), -100)
    labels[:, :1], labels[2, :4], labels[5] = x[:, :1] % 3, 2, 1
    np.savez(tmp_path / "data.npz", x=x.numpy(), labels=labels.numpy())
    training = TrainingConfig(steps=2, batch_size=8, shuffle=False)
    data = DataSpec(kind="npz", options={"path": str(tmp_path / "data.npz"), "holdout": 0.0})
    job = msgspec.structs.replace(job, model=ModelSpec(name=give_model(Masked())), data=data, training=training)
    with pytest.warns(UserWarning, match="by default that is 2 here, not 8"):
        prepared = prepare(job, least=2)
    assert [plan.micro_batches for plan in replica_plans(prepared, fleet_of(job)).values()] == [1, 1]
    samples = load_dataset(data, "train")
    for number, share in enumerate((slice(0, 4), slice(4, 8))):
        trainer = ReplicaTrainer(prepared.job, samples, number, 2)
        expected = build_model(job.model)(x=x[share], labels=labels[share])
        assert trainer.step(0) == pytest.approx(expected.item(), rel=1e-6)
    with pytest.warns(UserWarning, match="by default that is 2 here, not 8"):
        run = isthmus.train(job, observer=logged(io.StringIO()))
    assert RunFolder(run.path).job() == prepared.job
    module, again = build_model(job.model), build_model(job.model)
    run.load(module)
    merges = [line.merge for line in merges_file(run.path).lines()]
    replay(prepared.job, samples, fleet_of(job).names, merges).fill(fragments_of(again, 2))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


@pytest.mark.long
def test_a_replica_trains_in_half_on_an_accelerator(job: Job) -> None:
    job = msgspec.structs.replace(
        job,
        runtime=RuntimeConfig(device={"a-0": "checked:0", "b-0": "checked:1"}, emulate=False),
        training=msgspec.structs.replace(job.training, precision="bf16"),
    )
    run = isthmus.train(job, observer=logged(io.StringIO()))
    assert run.outcome == "done" and all(np.isfinite(point.loss) for point in run.heldout)


def test_an_accelerator_that_is_not_here_is_refused_before_anything_begins(job: Job) -> None:
    job = msgspec.structs.replace(job, runtime=RuntimeConfig(device={"a-0": "tpu:3"}))
    with pytest.raises(UserError, match=r"runtime.device.a-0: got 'tpu:3'"):
        isthmus.train(job, observer=logged(io.StringIO()))


def test_a_host_that_cannot_keep_up_is_named_but_not_a_device_that_was_stopped() -> None:
    step_s = {"a-0": 0.1, "b-0": 0.2, "c-0": 0.1}
    ended_s = {"a-0": [0.3, 0.6, 0.9, 1.0], "b-0": [0.2, 0.4, 9.4, 9.6], "c-0": [0.1]}
    assert overruns(ended_s, step_s) == [
        "warning: this computer is too slow to emulate a-0: half of its steps took 300 ms or more, "
        "not 100 ms; use fewer or slower devices"
    ]


def test_a_job_is_simulated_with_its_faults(job: Job) -> None:
    undisturbed = simulate_decoupled(job)
    late_s = undisturbed.run.seconds / 2
    too_late = Fault(kind="slow", device="a-0", time_s=1e6, factor=2)
    found = simulate_decoupled(job, [Fault(kind="lost", device="b-0", time_s=late_s), too_late])
    assert (undisturbed.exit_code, found.exit_code) == (0, 0)
    assert found.run.seconds > undisturbed.run.seconds
    happened = ["b-0: its process dies", "b-0 is lost: its process was killed by SIGKILL; the others go on"]
    assert [text for _, text in found.timeline()] == happened
    assert found.summary()["timeline"] == [{"time_s": late_s, "text": text} for text in happened]
    assert "without effect: a-0: computing takes 2 times as long (after the end of the run)" in found.lines()
    assert set(found.steps) == {"a-0", "b-0"}
    merged = f"{found.run.useful_samples:,.0f} samples merged, {100 * found.goodput:.1f} %"
    assert f"{merged} of what is possible without faults" in found.lines()
    away = simulate_decoupled(job, [Fault(kind="coordinator", time_s=late_s, lasts_s=2.0)])
    assert [text.partition(":")[0] for _, text in away.timeline()] == [
        "the coordinator is away for 2 s",
        "the coordinator was started again",
    ]
    assert away.exit_code == 0 and away.run.seconds > undisturbed.run.seconds + 2
    gone = simulate_decoupled(job, [Fault(kind="lost", device=name, time_s=late_s) for name in ("a-0", "b-0")])
    assert gone.exit_code == 4


def test_a_step_takes_what_a_plan_of_one_device_predicts_for_as_many_samples(job: Job) -> None:
    fleet = resolve_fleet(job.fleet)
    own = msgspec.structs.replace(job.training, batch_size=8, micro_batches=1)
    problem = prepare(msgspec.structs.replace(job, training=own, sync=SyncPolicy())).problem(fleet)
    expected = {
        name: build_replicas(problem, [PlanLayout((name,), (), 1)], planner="test").predicted.step_s
        for name in fleet.names
    }
    assert step_times(prepare(job), fleet) == expected


def test_each_replica_is_planned(job: Job, tmp_path: Path) -> None:
    planned = plan_replicas(job)
    step_s = {name: plan.predicted.step_s for name, plan in planned.plans.items()}
    assert step_s == step_times(prepare(job), resolve_fleet(job.fleet))
    assert {name: plan.used for name, plan in planned.plans.items()} == {name: (name,) for name in step_s}
    example = Path(__file__).parents[2] / "examples" / "decoupled.toml"
    shown = isthmus_command("plan", example)
    assert shown.code == 0 and "Replica cloud-0\n" in shown.out and "merged once in 8 batches" in shown.out
    assert "Not used" not in shown.out
    refused(isthmus_command("plan", example, "--compare", "all"), 2, "--compare", "each replica")


def test_a_plan_says_how_fast_all_replicas_are_what_links_carry_and_the_price(job: Job, tmp_path: Path) -> None:
    prices = "price_per_hour = 3.6\ncount = 1"
    egress = '[[region]]\nregion = "y"\negress_price_per_gb = 2.0\n'
    (tmp_path / "fleet.toml").write_text(FLEET.replace("count = 1", prices).replace("[[link]]", egress + "[[link]]"))
    planned = plan_replicas(job)
    step_s = step_times(prepare(job), fleet_of(job))
    batch_s = 16 / sum(8 / seconds for seconds in step_s.values())
    assert planned.samples_per_s == pytest.approx(16 / batch_s)
    period = job.sync.every
    assert planned.price.devices == pytest.approx(batch_s / 3600 * 2 * 3.6)
    assert planned.price.egress == pytest.approx(2.0 * sum(planned.sizes.delta) / 1e9 / period)  # the merger is in x
    assert planned.summary()["price_per_1000_batches"] == pytest.approx(1000 * planned.price.total)
    together, merged, link, price = planned.lines()
    assert together.startswith("All replicas together: ") and f"merged once in {period} batches" in merged
    assert link.startswith("Busiest link: the link of b-0, 100 Mbit/s, carries ")
    assert price.startswith("1,000 batches cost ")


def test_nothing_is_to_be_planned(job: Job) -> None:
    with pytest.raises(UserError, match="each replica is planned by itself"):
        prepare(job).problem(resolve_fleet(job.fleet))


def test_what_replicas_cannot_do_is_refused(job: Job) -> None:
    changed = msgspec.structs.replace
    odd = changed(job.training, batch_size=15, micro_batches=1)
    refused = {
        "training.batch_size: got 15 for 2 replicas, expected a multiple of 2": changed(job, training=odd),
        "training.non_finite: got 'ignore' with sync.mode 'decoupled'": changed(
            job, training=changed(job.training, non_finite="ignore")
        ),
    }
    for text, wrong in refused.items():
        with pytest.raises(UserError) as error:
            check_decoupled(wrong, fleet_of(wrong))
        assert str(error.value).startswith(text)


def test_settings_of_another_mode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decoupled: got a table with mode 'outer', .* for mode 'decoupled'"):
        msgspec.convert({"mode": "outer", "period": 5, "decoupled": {"quorum": 3}}, SyncPolicy)


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_merged_model_that_is_not_finite_is_saved_as_such_and_ends_the_run_as_diverged(
    spoilt: bool, tmp_path: Path
) -> None:
    job = job_of()
    run = MergedRun(job, {"a": ("a",), "b": ("b",)})
    run.model.register_buffer("mask", torch.tensor([0.0, -math.inf]))  # a constant of the model's own decides nothing
    if spoilt:
        run.merged.known[0][3] = math.nan
        run.fill()
    folder = RunFolder(tmp_path)
    watch = _Watch(job, run, Watch(folder, Callbacks(()), Uploads(), Silent()))
    traffic = MergeTraffic(1, 1, 1, 1)
    outcome = DecoupledOutcome(finish=Finish("done"), samples=16, merges=1, late=0, seconds=1.0, traffic=traffic)
    ran = watch.end(outcome, {})
    assert ran.outcome == ("diverged" if spoilt else "done") and isinstance(ran.failure, Diverged) is spoilt
    assert read_manifest(latest_checkpoint(folder.checkpoints)).finite is not spoilt
