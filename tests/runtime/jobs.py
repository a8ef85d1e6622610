"""Small jobs run for real over processes, and their plain twins."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from isthmus.cost import build_plan
from isthmus.data import DataSpec, load_dataset, sample_order
from isthmus.data.dataset import batch_at
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.training.checkpoint import latest_checkpoint, read_tensors
from isthmus.training.optim import Optimizers
from tests.training.reference import delayed_steps, reference_step, reference_update

TEXT = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 16, "max_bytes": 60_000})
DIGITS = DataSpec(kind="digits")
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 10}
"""Batch norm: its forward writes buffers."""


def images(folder: Path) -> DataSpec:
    """Forty small pictures of noise."""
    draw = np.random.default_rng(0)
    path = folder / "images.npz"
    np.savez(path, pixel_values=draw.normal(size=(40, 3, 32, 32)).astype(np.float32), labels=np.arange(40) % 10)
    return DataSpec(kind="npz", options={"path": str(path)})


def fleet_of(count: int, flops_per_s: float = 1e12) -> Fleet:
    """Equal devices on links that cost next to nothing."""
    devices = tuple(
        Device(name=f"d{i}", region="here", flops_per_s=flops_per_s, memory_bytes=1 << 34) for i in range(count)
    )
    return Fleet(name="test", devices=devices, links=Links(default=Link(1e-4, 1e9)))


def random_cut(prepared: Prepared, stages: int, seed: int, *, once: bool = False) -> list[int]:
    """Legal cut positions; with `once`, such that no value crosses more than one of them."""
    legal = cuts(Flow(prepared.captured.train))
    draw = random.Random(seed)
    for _ in range(1000):
        chosen = sorted(draw.sample(range(len(legal)), stages - 1))
        values = [set(legal[i].values) for i in chosen]
        if not once or not any(a & b for n, a in enumerate(values) for b in values[n + 1 :]):
            return [legal[i].position for i in chosen]
    raise AssertionError("no such cut")


def run(
    prepared: Prepared,
    boundaries: Sequence[int],
    folder: Path,
    *,
    watcher: Watcher | None = None,
    places: Mapping[str, ProcessPlace] = {},
) -> tuple[Plan, Outcome]:
    """Train the job over one process per stage."""
    fleet = fleet_of(len(boundaries) + 1)
    plan = build_plan(prepared.problem(fleet), fleet.names, boundaries, planner="test")
    options = RunOptions(emulate=prepared.job.runtime.emulate, backend=LocalBackend(places=places))
    return plan, run_plan(prepared, plan, fleet, folder, options, watcher or Watcher())


def final_weights(folder: Path) -> dict[str, Tensor]:
    return read_tensors(latest_checkpoint(folder / "checkpoints"))


def plain_run(job: Job, prepared: Prepared) -> tuple[nn.Module, list[float]]:
    """The same job as a plain loop over the eager module; returns it with the loss of each step."""
    torch.manual_seed(job.training.seed)
    module = prepared.build()
    config = job.engine()
    optimizers = Optimizers(config.optimizers, dict(module.named_parameters()), config.learning_rate, config.steps)
    data = load_dataset(job.used_data, "train")
    order = sample_order(data, job.training.seed, job.training.shuffle)
    every = [
        [
            batch_at(
                data,
                order,
                step * job.training.batch_size + m * job.micro_batch_size,
                job.micro_batch_size,
                list(data.columns),
            )
            for m in range(job.training.micro_batches)
        ]
        for step in range(job.training.steps)
    ]
    if job.schedule == "delayed":
        return module, delayed_steps(module, every, config, optimizers)
    losses: list[float] = []
    for step, batches in enumerate(every):
        loss, _ = reference_step(module, batches, config)
        losses.append(loss)
        reference_update(module, optimizers, step, config, loss)
    return module, losses


def job_of(model: str, options: dict[str, object], data: DataSpec, **training: object) -> Job:
    tables: dict[str, object] = {
        "name": "test",
        "model": msgspec.to_builtins(ModelSpec(name=model, options=options)),
        "data": msgspec.to_builtins(data),
        "runtime": {"emulate": False},
        "training": {"steps": 2, "batch_size": 8, "micro_batches": 4, **training},
        "optimizer": [{"name": "sgd", "lr": 0.1, "momentum": 0.9}],
    }
    return msgspec.convert(tables, Job)
