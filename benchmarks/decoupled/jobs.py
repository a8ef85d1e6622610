"""The job that all modes train: a small GPT on the source of Python's standard library, on four unequal devices."""

from __future__ import annotations

from pathlib import Path

import msgspec

import isthmus
from isthmus.cost import SyncPolicy
from isthmus.data import DataSpec
from isthmus.experiments import LearningRate, OptimizerConfig
from isthmus.job import TrainingConfig
from isthmus.models import ModelSpec

FLEET = Path(__file__).parent / "fleet.toml"
SHARES = {"fast-0": 4, "middle-0": 2, "slow-0": 1, "slow-1": 1}
"""Micro-batches of each device's replica where replicas wait for each other: by its speed."""
LENGTH = 32
PERIOD = 8


def job_of(mode: str, *, seed: int = 0, steps: int = 400, lr: float = 3e-3, **decoupled: object) -> isthmus.Job:
    """32 samples a batch. `decoupled` are keys of its table."""
    sync: dict[str, object] = {"mode": mode, "period": 1 if mode == "every-step" else PERIOD}
    if mode == "decoupled":
        sync["decoupled"] = {"fragments": 4, "quorum": 2, **decoupled}
    options: dict[str, object] = {"vocab_size": 256, "sequence_length": LENGTH, "width": 64, "layers": 2, "heads": 2}
    return isthmus.Job(
        name="decoupled",
        fleet=str(FLEET),
        model=ModelSpec(name="gpt", options=options),
        data=DataSpec(kind="text", options={"files": "stdlib", "sequence_length": LENGTH, "max_bytes": 4_000_000}),
        training=TrainingConfig(
            steps=steps, batch_size=32, micro_batches=8, seed=seed, clip_norm=1.0, eval_every=steps, eval_samples=512
        ),
        optimizer=(OptimizerConfig(name="adamw", lr=lr, weight_decay=0.01),),
        learning_rate=LearningRate(schedule="cosine", warmup_steps=20, final=0.1),
        sync=msgspec.convert(sync, SyncPolicy),
    )


def large_job_of(mode: str, hours: float, full_speed: float) -> isthmus.Job:
    """Of 5.3 million parameters, for as long: seconds for a step, as long for an exchange of gradients. A plain model
    has few cuts, so that a plan is found in a second: after each fault there is another."""
    small = job_of(mode)
    batch, period = 8192, small.sync.every
    steps = max(1, round(hours * 3600 * full_speed / batch / period)) * period
    return msgspec.structs.replace(
        small,
        model=ModelSpec(name="mlp", options={"features": 64, "width": 1600, "layers": 4, "classes": 10}),
        data=DataSpec(kind="digits", options={"flat": True}),
        training=TrainingConfig(steps=steps, batch_size=batch, micro_batches=8),
    )
