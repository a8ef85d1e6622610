"""The job and the fleet of the runs, and the plain loop that they must equal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from isthmus.data import DataSpec, SampleOrder, load_dataset
from isthmus.experiments import OptimizerConfig
from isthmus.fleet import Fleet, built_in_fleet
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig
from isthmus.models import ModelSpec
from isthmus.training.optim import Optimizers

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))  # the plain loop
from reference import reference_step, reference_update  # pyright: ignore[reportMissingImports]

GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 6, "heads": 4}
TEXT: dict[str, object] = {"files": "stdlib", "sequence_length": 64, "max_bytes": 1_000_000}
DEVICES = 6
"""One in each of six regions of the world."""
SLOWER = 250_000
"""0.5 GFLOP/s in place of a V100's 125 TFLOP/s: six of them are to fit on two cores."""
BATCH, MICRO_BATCHES = 32, 4
"""Fewer micro-batches than devices: a replica needs one at least, so there are pipelines to place."""


def fleet() -> Fleet:
    thinned = built_in_fleet("dtfm-case5").thin(DEVICES)
    devices = (msgspec.structs.replace(d, flops_per_s=d.flops_per_s / SLOWER) for d in thinned.devices)
    return msgspec.structs.replace(thinned, devices=tuple(devices))


def job(steps: int) -> Job:
    return Job(
        name="placement",
        model=ModelSpec(name="gpt", options=GPT),
        data=DataSpec(kind="text", options=TEXT),
        training=TrainingConfig(steps=steps, batch_size=BATCH, micro_batches=MICRO_BATCHES),
        optimizer=(OptimizerConfig(name="sgd", lr=0.1, momentum=0.9),),
        runtime=RuntimeConfig(timeout="120 s"),
    )


class Plain(NamedTuple):
    losses: list[float]
    """Of each step."""
    weights: dict[str, Tensor]
    """After the last."""


def plain(prepared: Prepared) -> Plain:
    """The job in one process, the whole batch through one module."""
    wanted, training = prepared.job, prepared.job.training
    torch.manual_seed(training.seed)
    module = prepared.build()
    config, weights = wanted.engine(), dict(module.named_parameters())
    optimizers = Optimizers(config.optimizers, weights, config.learning_rate, config.steps)
    data = load_dataset(wanted.data.training_alone(), "train")
    order = SampleOrder(len(data), training.seed, training.shuffle)
    losses: list[float] = []
    for step in range(training.steps):
        starts = (step * training.batch_size + m * wanted.micro_batch_size for m in range(wanted.micro_batches))
        batches = [data.batch(order.indices(start, wanted.micro_batch_size), list(data.columns)) for start in starts]
        losses.append(reference_step(module, batches, config)[0])
        reference_update(module, optimizers, step, config)
    return Plain(losses, {name: weight.detach() for name, weight in weights.items()})
