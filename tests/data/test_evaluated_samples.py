"""An evaluation of some of the held-out samples is of a random part of them: files are often sorted by label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from tests.runtime.jobs import final_weights, job_of, random_cut, run
from tests.training.reference import reference_loss
from torch import Tensor

from isthmus.data import ColumnSpec, DataSpec, load_dataset
from isthmus.data.dataset import Indices, evaluation_rows
from isthmus.data.layout import layout_of
from isthmus.data.partition import PartitionSpec
from isthmus.experiments import Watcher
from isthmus.federated.evaluation import test_data as held_out_of
from isthmus.federated.job import FederatedConfig, FederatedJob, client_data
from isthmus.federated.local import FederatedTraining
from isthmus.job import Job, prepare
from isthmus.models import ModelSpec
from isthmus.runtime.decoupled.merged_run import evaluated

SAMPLES, MOST = 4000, 2000


def drawn(size: int, count: int) -> np.ndarray:
    """As numpy draws them."""
    return np.sort(np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0]))).permutation(size)[:count])


@pytest.fixture
def sorted_by_label(tmp_path: Path) -> DataSpec:
    values = np.random.default_rng(0).standard_normal((SAMPLES, 6)).astype(np.float32)
    labels = np.arange(SAMPLES) * 2 // SAMPLES
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", pixel_values=values, labels=labels)
    path, heldout = str(tmp_path / "train.npz"), str(tmp_path / "test.npz")
    return DataSpec(kind="npz", options={"path": path, "heldout_path": heldout})


def half_of_them_is_one(labels: Tensor) -> bool:
    """Within four standard deviations of a draw without repetition."""
    spread = math.sqrt(0.25 / len(labels) * (1 - len(labels) / SAMPLES))
    return abs(float(labels.float().mean()) - 0.5) < 4 * spread


def federated(data: DataSpec, most: int) -> FederatedJob:
    return FederatedJob(
        name="sorted",
        model=ModelSpec(name="mlp"),
        data=data,
        federated=FederatedConfig(partition=PartitionSpec(scheme="iid", clients=4)),
        training=FederatedTraining(eval_samples=most),
    )


def test_a_federated_evaluation_is_of_both_halves(sorted_by_label: DataSpec) -> None:
    job = federated(sorted_by_label, MOST)
    found = held_out_of(job, client_data(job))
    assert found is not None
    assert len(found["labels"]) == MOST
    assert half_of_them_is_one(found["labels"])
    heldout = load_dataset(sorted_by_label, "heldout")
    assert torch.equal(found["pixel_values"], heldout.batch(drawn(SAMPLES, MOST), ["pixel_values"])["pixel_values"])
    every = held_out_of(federated(sorted_by_label, SAMPLES), None)
    assert every is not None
    assert torch.equal(every["pixel_values"], heldout.batch(range(SAMPLES), ["pixel_values"])["pixel_values"])


@pytest.mark.parametrize("most", [1, 3999, 4000, 10_000])
def test_an_evaluation_has_each_sample_once_and_the_same_ones_again(sorted_by_label: DataSpec, most: int) -> None:
    rows = evaluation_rows(load_dataset(sorted_by_label, "heldout"), most)
    assert rows.tolist() == drawn(SAMPLES, most).tolist()
    assert len(set(rows.tolist())) == min(most, SAMPLES)


class Blocks:
    """A hundred blocks of ten samples, two of which are read at once."""

    layout = layout_of([10] * 100, 2)
    columns: Mapping[str, ColumnSpec] = MappingProxyType({})
    fingerprint = ""

    def __len__(self) -> int:
        return 1000

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, Tensor]:
        raise NotImplementedError


def test_an_evaluation_of_data_in_blocks_reads_few_blocks_drawn_at_random() -> None:
    rows = evaluation_rows(Blocks(), 60).tolist()
    assert rows == sorted(set(rows))
    blocks = {row // 10 for row in rows}
    assert len(blocks) == 6
    assert max(blocks) - min(blocks) > 20, "not the first ones"
    assert evaluation_rows(Blocks(), 2000).tolist() == list(range(1000))


def pipeline(data: DataSpec) -> Job:
    options: dict[str, object] = {"features": 6, "width": 5, "layers": 2, "classes": 2}
    return job_of("mlp", options, data, steps=1, batch_size=8, micro_batches=2, eval_every=1, eval_samples=64)


def test_an_evaluation_of_a_pipeline_is_the_plain_modules(sorted_by_label: DataSpec, tmp_path: Path) -> None:
    job = pipeline(sorted_by_label)
    prepared = prepare(job)
    losses: list[tuple[float, int]] = []

    def advanced(item, loss, spans) -> None:
        if item.kind == "eval":
            losses.append((loss, item.micro_batches))

    _, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path / "run", watcher=Watcher(advanced=advanced))
    assert outcome.outcome == "done"
    module = prepared.build()
    module.load_state_dict(final_weights(tmp_path / "run"), strict=False)
    heldout, rows = load_dataset(sorted_by_label, "heldout"), drawn(SAMPLES, 64)
    batches = [heldout.batch(rows[at : at + 4], list(heldout.columns)) for at in range(0, 64, 4)]
    assert half_of_them_is_one(torch.cat([batch["labels"] for batch in batches]))
    told = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    assert told == pytest.approx(reference_loss(module, batches), rel=1e-6)


def test_an_evaluation_of_decoupled_replicas_is_the_plain_modules(sorted_by_label: DataSpec) -> None:
    module = prepare(pipeline(sorted_by_label)).build()
    heldout = load_dataset(sorted_by_label, "heldout")
    batch = heldout.batch(drawn(SAMPLES, 64), list(heldout.columns))
    assert evaluated(module, heldout, 64, 16)[0] == pytest.approx(reference_loss(module, [batch]), rel=1e-6)
