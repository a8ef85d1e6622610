"""NaN and infinity in real runs: they end with a line that says where, or the step is left out everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.data import DataSpec
from isthmus.errors import Diverged
from isthmus.experiments import Watcher, check_outcome
from isthmus.graph import Flow, cuts
from isthmus.job import Job, prepare
from isthmus.training.checkpoint import latest_checkpoint, newest_checkpoint, read_manifest, read_tensors
from isthmus.training.optim import OptimizerConfig

from .commands import isthmus, refused
from .jobs import final_weights, job_of, plain_run, random_cut, run
from .test_replicated_runs import planned
from .test_replicated_runs import run as run_plan

BAD = 19
"""A sample of step 3's second micro-batch."""

GUARDED = """
import torch
from torch import nn
from torch.nn import functional as F

class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 10)

    def forward(self, x, labels):
        offset = torch.log(x[:, 0].abs()).mean()  # of no parameter: infinite where a sample has a zero there
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x), labels) + offset


class Masked(nn.Module):
    # A mask of -inf, made once and added in every layer.
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, labels):
        mask = torch.zeros(x.shape).masked_fill(x < -1, float("-inf"))
        for layer in self.layers:
            x = x + layer((x + mask).softmax(-1))
        return F.cross_entropy(torch.cat([x, x], -1)[:, :10], labels)
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "guarded_model.py").write_text(GUARDED)
    sys.path.insert(0, str(folder))
    yield "guarded_model:Guarded"
    sys.path.remove(str(folder))


def data(folder: Path, value: float, column: str, width: int, scale: float = 1.0) -> DataSpec:
    draw = np.random.default_rng(0)
    values = draw.normal(scale=scale, size=(40, width)).astype(np.float32)
    values[BAD, 0] = value
    path = folder / "data.npz"
    np.savez(path, **{column: values, "labels": np.arange(40) % 10})
    return DataSpec(kind="npz", options={"path": str(path)})


def pictures(folder: Path, **training: object) -> Job:
    """An MLP on pictures of which one holds a NaN."""
    settings = {"steps": 5, "shuffle": False, "save_every": 1, **training}
    return job_of("mlp", {}, data(folder, float("nan"), "pixel_values", 64), **settings)


def test_a_nan_ends_the_run_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    prepared = prepare(pictures(tmp_path, keep_checkpoints=1))
    _, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path)
    assert outcome.outcome == "diverged"
    with pytest.raises(Diverged, match=r"step 3: .* stage 0 on device 'd0', micro-batch 1; column 'pixel_values'"):
        check_outcome(outcome)
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert read_manifest(checkpoint).step == 2
    assert all(value.isfinite().all() for value in read_tensors(checkpoint).values())


def test_a_mask_of_infinities_that_crosses_a_cut_is_trained_as_in_the_plain_loop(tmp_path: Path, guarded: str) -> None:
    job = job_of(guarded.replace("Guarded", "Masked"), {}, data(tmp_path, 0.0, "x", 8), steps=3, save_every=1)
    prepared = prepare(job)
    flow = Flow(prepared.captured.train)
    middle = [c.position for c in cuts(flow) if any("masked_fill" in flow.by_name[v.op].target for v in c.values)][-1]
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    _, outcome = run(prepared, [middle], tmp_path, watcher=watcher)
    assert outcome.outcome == "done"
    module, expected = plain_run(job, prepared)
    assert losses == expected
    saved = final_weights(tmp_path)
    for name, value in module.named_parameters():
        assert torch.equal(saved[name], value), name


def test_weights_that_a_step_made_infinite_are_no_checkpoint(tmp_path: Path) -> None:
    job = job_of("mlp", {}, data(tmp_path, 1.0, "pixel_values", 64, scale=1e3), save_every=1)
    prepared = prepare(msgspec.structs.replace(job, optimizer=(OptimizerConfig(name="sgd", lr=1e38),)))
    _, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path)
    with pytest.raises(Diverged, match=r"after step 1 the parameter '.*' of stage \d on device 'd\d' is not finite"):
        check_outcome(outcome)
    assert newest_checkpoint(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_step_that_is_left_out_is_left_out_as_in_the_plain_loop(tmp_path: Path, clip_norm: float) -> None:
    job = pictures(tmp_path, non_finite="skip", clip_norm=clip_norm)
    job = msgspec.structs.replace(job, optimizer=(OptimizerConfig(name="adamw", lr=0.01),))
    prepared = prepare(job)
    _, outcome = run(prepared, random_cut(prepared, 3, 1, once=True), tmp_path)
    assert outcome.outcome == "done"
    module, _ = plain_run(job, prepared)
    saved = final_weights(tmp_path)
    for name, value in module.named_parameters():
        assert torch.equal(saved[name], value), name
        assert saved[f"optimizer.{name}.step"] == 4


def test_replicas_leave_out_a_step_of_which_one_has_an_infinite_loss(tmp_path: Path, guarded: str) -> None:
    job = job_of(guarded, {}, data(tmp_path, 0.0, "x", 8), steps=4, shuffle=False, non_finite="skip")
    prepared = prepare(job)
    _, losses = run_plan(prepared, planned(prepared, [((0.5,), 2), ((0.3,), 2)]), tmp_path)
    module, expected = plain_run(job, prepared)
    assert [np.isfinite(loss) for loss in losses] == [True, True, False, True]
    assert [np.isfinite(loss) for loss in expected] == [True, True, False, True]
    saved = final_weights(tmp_path)
    for name, value in module.named_parameters():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)


JOB = """
name = "bad"
planner = "even"
devices = 2
run_dir = "{folder}/runs"
model = {{name = "mlp"}}
data = {{kind = "npz", options = {{path = "{folder}/data.npz"}}}}
compression = {{method = "bf16"}}
training = {{steps = 4, batch_size = 8, micro_batches = 4, shuffle = false, save_every = 1}}
runtime = {{emulate = false}}
"""


def test_the_command_fails_with_a_line_and_goes_on_when_told_to_skip(tmp_path: Path) -> None:
    """Nor does compression, which packs finite numbers only, hide where they come from."""
    pictures(tmp_path)
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(folder=tmp_path))
    refused(isthmus("train", job), 1, "step 3", "stage 0", "micro-batch 1", "checkpoint is of step 2")
    job.write_text(job.read_text().replace("save_every", 'non_finite = "skip", save_every'))
    done = isthmus("train", job, "--resume")
    assert done.code == 0, done.err
    assert "after step 2" in done.err
    assert all(v.isfinite().all() for v in read_tensors(latest_checkpoint(tmp_path / "runs/bad/checkpoints")).values())
