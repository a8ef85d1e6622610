"""Scikit-learn's digits, those of a holder and those of an attacker; the job that splits a CNN between two devices, and
what the first of them sends."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.cost import build_plan
from isthmus.data import DataSpec, load_dataset
from isthmus.disclosure import ActivationNoise
from isthmus.experiments import LearningRate, OptimizerConfig
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, Ref
from isthmus.job import Job, PlanConfig, Prepared, PrivacyConfig, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec, build_model
from isthmus.plans import Plan
from isthmus.runtime.coordinator.activation_privacy import protection
from isthmus.runtime.coordinator.stages import stage_pairs
from isthmus.training.engine import TorchEngine
from isthmus.training.local_privacy import Privatizer

HOLDER, OTHER = "holder", "other"
BOUNDARIES = {"1st layer": ("relu", 2), "2nd layer": ("relu_1", 4)}
"""The operator behind which the model is cut, and so many of `CNN.body`'s modules."""
VICTIMS, HELD_OUT = 900, 200
EPOCHS, BATCH, MICRO_BATCHES = 12, 20, 2
MODEL = ModelSpec(name="cnn", options={"width": 8})
SEED = 0


class Digits(NamedTuple):
    victims: Tensor
    victims_labels: Tensor
    attackers: Tensor
    attackers_labels: Tensor


def parted(folder: Path) -> tuple[DataSpec, Digits]:
    """Digits of the holder, on disk, and those of the attacker: no image is in both."""
    whole = load_dataset(DataSpec(kind="digits", options={"holdout": 0.0}), "train")
    columns = whole.batch(np.random.default_rng(0).permutation(len(whole)), ["pixel_values", "labels"])
    ends = {"train": (0, VICTIMS), "heldout": (VICTIMS, VICTIMS + HELD_OUT)}
    for name, (first, end) in ends.items():
        np.savez(folder / f"{name}.npz", allow_pickle=False, **{k: v[first:end].numpy() for k, v in columns.items()})
    pixels, labels = columns["pixel_values"], columns["labels"]
    first = VICTIMS + HELD_OUT
    paths = {"path": str(folder / "train.npz"), "heldout_path": str(folder / "heldout.npz")}
    return DataSpec(kind="npz", options=dict(paths)), Digits(
        pixels[:VICTIMS], labels[:VICTIMS], pixels[first:], labels[first:]
    )


def job_of(data: DataSpec, noise: ActivationNoise | None, epochs: int) -> Job:
    t = TrainingConfig(
        steps=epochs * VICTIMS // BATCH,
        batch_size=BATCH,
        micro_batches=MICRO_BATCHES,
        eval_every=10**9,
        eval_samples=BATCH,
        seed=SEED,
    )
    return Job(
        name="reconstruction",
        model=MODEL,
        data=data,
        training=t,
        plan=PlanConfig(data_holder=HOLDER),
        privacy=PrivacyConfig(activations=noise) if noise is not None else None,
        optimizer=(OptimizerConfig(lr=3e-3),),
        learning_rate=LearningRate(schedule="cosine", warmup_steps=20),
        runtime=RuntimeConfig(emulate=False),
    )


def fleet() -> Fleet:
    devices = tuple(Device(name=n, region="here", flops_per_s=1e11, memory_bytes=1 << 32) for n in (HOLDER, OTHER))
    return Fleet(name="two", devices=devices, links=Links(default=Link(1e-3, 1e8)))


class Messages:
    """What the holder sends of images: its engine and its noise, as a device process runs them."""

    def __init__(self, prepared: Prepared, plan: Plan, weights: dict[str, Tensor]) -> None:
        pairs = stage_pairs(plan, prepared.captured, clips=False)
        found = protection(prepared, plan, pairs, [HOLDER])
        stage, self._size = pairs[0], plan.micro_batch_size
        self._engine = TorchEngine(stage.train, stage.evaluation, prepared.job.engine(), weights)
        placeholders = {op.target: op.name for op in prepared.captured.eval.ops if op.kind == "placeholder"}
        self._placeholders = placeholders
        (self.value,) = (c.value for c in stage.evaluation.sends if c.value.op not in placeholders.values())
        self.released = found.released.get(0)
        self._private = Privatizer(self.released, keeps=False) if self.released is not None else None

    def of(self, images: Tensor, count: int = 1) -> Tensor:
        """`count` messages of each, [count, n, values]; the last images that fill no micro-batch are left out."""
        sent: list[Tensor] = []
        for first in range(0, len(images) - self._size + 1, self._size):
            pixels = images[first : first + self._size]
            columns = {"pixel_values": pixels, "labels": torch.zeros(len(pixels), dtype=torch.int64)}
            inputs = {Ref(self._placeholders[name]): column for name, column in columns.items()}
            out = self._engine.evaluate(0, inputs)
            again = (self._private.forward(0, out, training=False) if self._private else out for _ in range(count))
            sent.append(torch.stack([each[self.value] for each in again]))
        return torch.cat(sent, 1)


def planned(data: DataSpec, boundary: str, noise: ActivationNoise | None, epochs: int) -> tuple[Prepared, Plan]:
    prepared = prepare(job_of(data, noise, epochs))
    names = [op.name for op in Flow(prepared.captured.train, columns_first=True).operators]
    cut = names.index(BOUNDARIES[boundary][0]) + 1
    return prepared, build_plan(prepared.problem(fleet()), [HOLDER, OTHER], [cut], planner="reconstruction")


def body(module: nn.Module) -> nn.Sequential:
    """All of a `CNN` but its head."""
    found = module.get_submodule("body")
    assert isinstance(found, nn.Sequential)
    return found


def public_clip(digits: Digits, boundary: str) -> float:
    """The median norm of the attacker's own images at the boundary, with the weights that training begins with: no
    image of the holder has part in it."""
    torch.manual_seed(SEED)
    module = build_model(MODEL)
    with torch.no_grad():
        values = body(module)[: BOUNDARIES[boundary][1]](digits.attackers).flatten(1)
    return float(values.norm(dim=1).median())
