"""Runs on a stream: as the plain loop over it, resumed in the middle of an epoch, and refused where they cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from isthmus.api.folder import RunFolder
from isthmus.data import DataSpec, load_dataset, sample_order
from isthmus.experiments import Watcher
from isthmus.job import prepare
from isthmus.training.checkpoint import latest_checkpoint, read_tensors
from tests.data.shards import write_parquet, write_tar
from tests.tiers import represented_by

from .commands import edited, isthmus, refused, write_job
from .jobs import final_weights, job_of, plain_run, random_cut, run

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
