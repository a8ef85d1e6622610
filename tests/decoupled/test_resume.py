"""Runs of decoupled replicas go on from their checkpoints, with the bits that their record gives."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

import isthmus
from isthmus.api.terminal import logged
from isthmus.data import load_dataset
from isthmus.errors import UserError
from isthmus.fleet import resolve_fleet
from isthmus.job import Job
from isthmus.models import build_model
from isthmus.programs.merger import Merger
from isthmus.protocol.decoupled_events import CollectChanges, MergeChanges, MergesDone, StepsMade
from isthmus.run_files import JOB
from isthmus.runtime.decoupled.merged_run import MergedRun, merges_file
from isthmus.stores import Store, StoreConfig, commits_in
from isthmus.training.checkpoint import CheckpointWriter, Manifest, latest_checkpoint, read_manifest
from isthmus.training.decoupled import fragments_of
from isthmus_testing.decoupled_replay import replay
from tests.runtime.commands import isthmus as isthmus_command
from tests.runtime.commands import start, wait_until

from ..programs.ports import MergerRecorder
from .small import job_of, rules
from .test_jobs import FLEET

URL = "memory://decoupled"
OUTER = {"rate": 0.7, "momentum": 0.9}


class _Stops(isthmus.Callback):
    def __init__(self, stop: isthmus.Stop, step: int) -> None:
        self._stop, self._at = stop, step

    def step(self, done: isthmus.StepDone) -> None:
        if done.step >= self._at:
            self._stop.request()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "fleet.toml").write_text(FLEET)
    found = job_of(**OUTER)
    training = msgspec.structs.replace(found.training, micro_batches=2, save_every=5)
    return msgspec.structs.replace(found, fleet=str(tmp_path / "fleet.toml"), training=training)


def _merges(run: Path) -> list[MergeChanges]:
    return [line.merge for line in merges_file(run).lines()]


def _check_bits(job: Job, run: isthmus.Run, checkpoint: Path | None) -> None:
    """The run's weights are those that its record gives, from the checkpoint that it went on from."""
    module, again = build_model(job.model), build_model(job.model)
    run.load(module)
    names, data = resolve_fleet(job.fleet).names, load_dataset(job.used_data, "train")
    replay(job, data, names, _merges(run.path), checkpoint).fill(fragments_of(again, 2))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_an_interrupted_run_goes_on_from_its_store(job: Job, tmp_path: Path) -> None:
    """On another machine, with more steps: weights, the outer optimizer, samples and steps are those of before."""
    job, stop = msgspec.structs.replace(job, store=StoreConfig(url=URL)), isthmus.Stop()
    run = isthmus.train(
        job, run=tmp_path / "first", stop=stop, callbacks=[_Stops(stop, 12)], observer=logged(io.StringIO())
    )
    assert run.outcome == "interrupted"
    _check_bits(job, run, None)
    saved = shutil.copytree(latest_checkpoint(run.path / "checkpoints"), tmp_path / "saved")
    manifest = read_manifest(saved)
    begun = manifest.merges
    assert isinstance(begun, MergesDone)
    assert manifest.step == begun.samples // 16 >= 12 and begun.samples == 8 * sum(begun.steps.values())
    shutil.rmtree(run.path)

    shown = io.StringIO()
    run = isthmus.train(
        job, run=tmp_path / "second", resume=True, overrides={"training.steps": 45}, observer=logged(shown)
    )
    assert f"resuming {run.path} after step {manifest.step}" in shown.getvalue()
    assert run.outcome == "done" and [point.step for point in run.losses] == sorted({p.step for p in run.losses})
    assert run.losses[-1].step == 45
    merges = _merges(run.path)
    numbers = [merge.merge for merge in merges]
    assert numbers == sorted(set(numbers)) and begun.merge in numbers and numbers[-1] > begun.merge
    first = [c for m in merges if m.merge > begun.merge for f in m.fragments for c in f.contributions]
    assert all(c.steps > begun.steps[c.replica] for c in first)
    _check_bits(run.job, run, saved)
    names = Store(URL).names()
    assert JOB in names and any(commit.endswith("step-000045") for commit in commits_in(names))
    again = isthmus.train(run.job, run=run.path, resume=True, observer=logged(shown))
    assert again.outcome == "done" and "nothing left to do" in shown.getvalue()


@pytest.mark.long
def test_a_run_whose_coordinator_is_killed_goes_on_from_its_newest_checkpoint(job: Job, tmp_path: Path) -> None:
    text = f"""
name = "small"
fleet = "{tmp_path / "fleet.toml"}"
[model]
name = "mlp"
[data]
kind = "digits"
[training]
steps = 200
batch_size = 16
micro_batches = 2
save_every = 5
keep_checkpoints = 1000
[[optimizer]]
name = "sgd"
lr = 0.05
momentum = 0.9
[sync]
mode = "decoupled"
period = 4
decoupled = {{ fragments = 2, rate = 0.7, momentum = 0.9 }}
"""
    (tmp_path / "job.toml").write_text(text)
    path = tmp_path / "run"
    process = start("train", tmp_path / "job.toml", "--run", path)
    wait_until(lambda: len(list(path.glob("checkpoints/step-*"))) > 2, process)
    process.kill()
    process.communicate()
    saved = latest_checkpoint(path / "checkpoints")
    lost = _merges(path)
    done = isthmus_command("train", tmp_path / "job.toml", "--run", path, "--resume", "--set", "training.steps=60")
    assert done.code == 0, done.err
    step = read_manifest(saved).step
    assert f"after step {step}" in done.err
    run = isthmus.Run(path)
    assert run.outcome == "done" and run.losses[-1].step == 60
    begun = read_manifest(saved).merges
    assert isinstance(begun, MergesDone) and lost[-1].merge >= begun.merge
    _check_bits(run.job, run, saved)


def test_a_checkpoint_of_another_kind_of_run_is_refused(job: Job, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    saved = writer.commit(Manifest(step=4, seed=job.training.seed, batch=16))
    with pytest.raises(UserError, match=r"resume: sync\.mode: got 'decoupled'"):
        MergedRun(job, {"a-0": ("a-0",)}, saved)


def test_the_merger_goes_on_with_numbers_samples_and_steps() -> None:
    begun = MergesDone(merge=5, samples=100, steps={"a": 7, "b": 9})
    machine, port = Merger(rules(samples=None, fragments=1), "ab", begun=begun), MergerRecorder()
    machine.port = port.port
    machine.clock(10.0)
    machine.joined("a")
    assert machine.merges_done == begun
    port.took()
    machine.heard("a", StepsMade(steps=8, samples=64))
    assert ("ask", "a", CollectChanges(merge=6, fragments=(0,))) in port.took()
    assert machine.merges_done == MergesDone(merge=6, samples=164, steps={"a": 8, "b": 9})
