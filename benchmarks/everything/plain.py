"""What the real run is compared with: one process that trains on as many samples, at several learning rates."""

from __future__ import annotations

import msgspec

import isthmus
from isthmus.data import load_dataset
from isthmus.runtime.decoupled.merged_run import evaluated
from isthmus_testing.replica_trainer import ReplicaTrainer

MICRO_BATCH = 64
"""Samples: larger than in the run, so the losses differ by rounding."""
LONGER = 1.04
"""A real run ends some batches after it should: as much longer is trained here, and evaluated after each batch."""


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: float
    losses: dict[int, float]
    """Held out, after so many samples."""

    def at(self, samples: int) -> float:
        """After so many samples, or the first batch after them."""
        return self.losses[min((n for n in self.losses if n >= samples), default=max(self.losses))]


def plain(job: isthmus.Job, learning_rate: float) -> Plain:
    """`job` is that of the real run."""
    rated = tuple(msgspec.structs.replace(one, lr=learning_rate) for one in job.optimizer)
    own = msgspec.structs.replace(job, optimizer=rated)
    training, heldout = own.training, load_dataset(own.data, "heldout")
    batch, losses = training.batch_size, dict[int, float]()
    trainer = ReplicaTrainer(own.cut_into(batch // MICRO_BATCH), load_dataset(own.data, "train"), 0, 1)
    for step in range(round(training.steps * LONGER)):
        trainer.step(step * batch)
        if step >= training.steps - 2:
            losses[(step + 1) * batch] = evaluated(trainer.module, heldout, training.eval_samples, MICRO_BATCH)[0]
    return Plain(learning_rate=learning_rate, losses=losses)
