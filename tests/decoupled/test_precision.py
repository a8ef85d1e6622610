"""Replicas that compute in half types merge the float32 weights that their optimizers update."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
import torch

from isthmus.accelerators import HOST
from isthmus.data import load_dataset
from isthmus.protocol.decoupled_events import NEVER
from isthmus.runtime.decoupled.device_replica import GraphTrainer
from isthmus.training.scaling import LossScaling

from .small import job_of
from .test_graph_trainer import ordered


def _trainer(precision: Literal["fp32", "bf16", "fp16"], **training: object) -> tuple[GraphTrainer, list[torch.Tensor]]:
    job = job_of(codec="none")
    training = {"precision": precision, **training}
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, **training))
    run, order, kept = ordered(job, "c")
    trainer = GraphTrainer(order, kept, load_dataset(job.used_data, "train"), HOST)
    for fragment, values in enumerate(run.merged.known):
        trainer.fragments.take(fragment, values, whole=True, included=NEVER, first=True)
    return trainer, run.merged.known


def _given(trainer: GraphTrainer) -> torch.Tensor:
    """What it has learned, as the codec `none` sends it."""
    return torch.cat([trainer.fragments.give(fragment, 1).view(torch.float32) for fragment in (0, 1)])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_contributions_are_of_float32_weights(precision: Literal["bf16", "fp16"]) -> None:
    (wide, _), (narrow, known) = _trainer("fp32"), _trainer(precision)
    for step in range(4):
        assert narrow.step(16 * step) == pytest.approx(wide.step(16 * step), rel=0.05)
    expected, found = _given(wide), _given(narrow)
    assert torch.linalg.vector_norm(found - expected) < 0.1 * torch.linalg.vector_norm(expected)
    half = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
    weights = torch.cat(known) - found
    assert not torch.equal(weights, weights.to(half).float()), "finer than what it computes with"


def test_a_step_computes_with_what_was_taken_since_the_last() -> None:
    trainer, known = _trainer("bf16")
    before = trainer.step(0)
    for fragment, values in enumerate(known):
        taken = torch.zeros_like(values)
        trainer.fragments.take(fragment, taken, whole=True, included=NEVER, first=False)
    assert trainer.step(16) != pytest.approx(before, rel=0.01)


def test_a_step_whose_gradients_are_not_finite_changes_nothing() -> None:
    trainer, _ = _trainer("fp16", loss_scale=LossScaling(init_scale=2.0**40, growth_interval=1000))
    trainer.step(0)
    assert not _given(trainer).any()
