"""Runs on a stream: as the plain loop over it, resumed in the middle of an epoch, and refused where they cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from isthmus import train
from isthmus.api.export import export_model
from isthmus.api.folder import RunFolder
from isthmus.cost import Decoupled, SyncPolicy
from isthmus.data import DataSpec, load_dataset, sample_order
from isthmus.experiments import Watcher
from isthmus.fleet import dump_fleet
from isthmus.job import prepare
from isthmus.models import build_model
from isthmus.runtime.decoupled.merged_run import seeded_model
from isthmus.training.checkpoint import latest_checkpoint, read_tensors
from isthmus.training.decoupled import fragments_of
from isthmus_testing.decoupled_replay import replay
from tests.data.shards import write_parquet, write_tar
from tests.tiers import represented_by

from .commands import edited, isthmus, refused, write_job
from .jobs import final_weights, fleet_of, job_of, plain_run, random_cut, run
from .test_replicated_runs import assert_plain, planned
from .test_replicated_runs import run as run_replicas

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 2}
FEDERATED = """
name = "streamed"
[model]
name = "mlp"
[data]
kind = "stream"
options = {{path = "{path}", columns = {{input = "x", target = "y"}}}}
[federated.partition]
clients = 4
[federated]
rounds = 1
[training]
batch_size = 4
"""


@pytest.mark.parametrize("form", represented_by(["parquet", "tar"], "parquet"))
def test_a_pipeline_equals_the_plain_loop_bit_for_bit(form: str, tmp_path: Path) -> None:
    """Over more than an epoch, of windows of two blocks."""
    if form == "tar":
        path, text = write_tar(tmp_path / "data", files=3, rows=4), "txt"
    else:
        path, text = write_parquet(tmp_path / "data", files=2, rows=6, group=2), "text"
    options: dict[str, object] = {"path": path, "text": text, "sequence_length": 16, "shuffle_blocks": 2}
    spec = DataSpec(kind="stream", options=options)
    assert len(load_dataset(spec, "train")) < 100
    job = job_of("gpt", GPT, spec, steps=13, clip_norm=1.0, eval_every=6, eval_samples=4)
    prepared = prepare(job)
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    _, outcome = run(prepared, random_cut(prepared, 3, seed=3, once=True), tmp_path / "run", watcher=watcher)
    assert outcome.outcome == "done"
    module, expected = plain_run(job, prepared)
    assert losses == expected
    saved = final_weights(tmp_path / "run")
    for name, own in module.named_parameters():
        assert torch.equal(saved[name], own), name


def _parquet(folder: Path) -> DataSpec:
    path = write_parquet(folder, files=2, rows=6, group=2)
    return DataSpec(kind="stream", options={"path": path, "text": "text", "sequence_length": 16, "shuffle_blocks": 2})


@pytest.mark.long
def test_replicas_equal_the_plain_loop_over_a_stream(tmp_path: Path) -> None:
    job = job_of("gpt", GPT, _parquet(tmp_path / "data"), steps=13, clip_norm=1.0)
    prepared = prepare(job)
    plan = planned(prepared, [((0.5,), 2), ((), 2)])
    _, losses = run_replicas(prepared, plan, tmp_path / "run")
    assert_plain(job, prepared, tmp_path / "run", losses)


@pytest.mark.long
@pytest.mark.parametrize(
    "groups", [(("d0",), ("d1",), ("d2",)), (("d0", "d1"), ("d2",))], ids=["devices", "a pipeline"]
)
def test_replicas_that_never_wait_merge_what_the_record_says_and_are_exported(
    groups: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    (tmp_path / "fleet.toml").write_text(dump_fleet(fleet_of(3)))
    job = job_of("gpt", GPT, _parquet(tmp_path / "data"), steps=9, batch_size=12, micro_batches=6)
    rules = Decoupled(fragments=2, replicas=groups)
    sync = SyncPolicy(mode="decoupled", period=2, decoupled=rules)
    job = msgspec.structs.replace(job, sync=sync, fleet=str(tmp_path / "fleet.toml"), planner="even")
    done = train(job, run=tmp_path / "run", quiet=True)
    samples, merges = load_dataset(job.used_data, "train"), [line.merge for line in done.merges]
    names = ["+".join(group) for group in groups]
    expected, found = seeded_model(job), seeded_model(job)
    replay(job, samples, names, merges).fill(fragments_of(expected, 2))
    exported, _ = export_model(done.path, tmp_path / "exported")
    found.load_state_dict(load_file(tmp_path / "exported" / "model.safetensors"))
    assert exported.done == done.load(build_model(job.model)) >= 9
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


@pytest.mark.long
def test_resumed_in_the_middle_of_an_epoch_it_sees_the_same_batches(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    job = edited(
        write_job(tmp_path),
        ('kind = "text"', 'kind = "stream"'),
        (
            'files = "stdlib", sequence_length = 16, max_bytes = 40000',
            f'path = "{path}", text = "text", sequence_length = 16',
        ),
    )
    done = isthmus("train", job, "--run", tmp_path / "whole")
    assert done.code == 0, done.err
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for step in (9, 12):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{step:06d}")
    done = isthmus("train", job, "--run", tmp_path / "again", "--resume")
    assert done.code == 0 and "after step 6" in done.err, done.err
    whole, again = (read_tensors(latest_checkpoint(tmp_path / name / "checkpoints")) for name in ("whole", "again"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert RunFolder(tmp_path / "whole").losses() == RunFolder(tmp_path / "again").losses()
    write_parquet(tmp_path / "data", rows=61)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000012")
    changed = isthmus("train", job, "--run", tmp_path / "again", "--resume")
    refused(changed, 2, "has other training samples")


def test_stages_without_data_get_the_layout_too(tmp_path: Path) -> None:
    spec = DataSpec(kind="stream", options={"path": write_parquet(tmp_path), "text": "text", "sequence_length": 16})
    job = job_of("gpt", GPT, spec)
    prepared, data = prepare(job), load_dataset(job.used_data, "train")
    assert prepared.samples.layout == sample_order(data, 0).layout is not None


def test_a_federated_job_is_refused_in_one_line(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(FEDERATED.format(path=write_parquet(tmp_path / "data")))
    refused(isthmus("train", job, "--run", tmp_path / "run"), 2, "data: got a stream in a federated job")
