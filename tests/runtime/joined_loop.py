"""The plain loop over the data of several holders, in the order in which they feed a chain."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isthmus.data import JoinedDataset, JoinedOrder, load_dataset
from isthmus.data.dataset import Indices, Split
from isthmus.job import Prepared
from isthmus.plans.schedule import feeder_slot, whole
from isthmus.training.optim import Optimizers
from tests.training.reference import reference_loss, reference_step, reference_update


class Plain:
    """The plain loop on the joined data, in the order that the holders' counts give."""

    def __init__(self, prepared: Prepared) -> None:
        self.job, self._samples = prepared.job, prepared.samples
        torch.manual_seed(self.job.training.seed)
        self.module = prepared.build()
        self.config = self.job.engine()
        self._optimizers = Optimizers(
            self.config.optimizers, dict(self.module.named_parameters()), self.config.learning_rate, self.config.steps
        )
        splits: tuple[Split, ...] = ("train", "heldout")
        self._sets = {split: self._joined(split) for split in splits}
        self._order = JoinedOrder(
            tuple(h.train for h in self._samples.holders.values()), self.job.training.seed, self.job.training.shuffle
        )

    def _joined(self, split: Split) -> JoinedDataset:
        return JoinedDataset([load_dataset(self.job.used_data.at(name), split) for name in self.job.plan.feeders])

    def _batch(self, split: Split, indices: Indices) -> dict[str, Tensor]:
        found = self._sets[split]
        return found.batch(indices, list(found.columns))

    def step(self, step: int) -> float:
        count, size = self.config.micro_batches, self.config.micro_batch_size
        batches = [self._batch("train", self._order.indices(step * count + m, size)) for m in range(count)]
        loss, _ = reference_step(self.module, batches, self.config)
        reference_update(self.module, self._optimizers, step, self.config, loss)
        return loss

    def labels(self, steps: int) -> dict[str, list[bytes]]:
        """Of each micro-batch that is trained on, as they would travel; by holder."""
        size, counts = self.config.micro_batch_size, tuple(h.train for h in self._samples.holders.values())
        found: dict[str, list[bytes]] = {name: [] for name in self._samples.holders}
        for number in range(steps * self.config.micro_batches):
            labels = self._batch("train", self._order.indices(number, size))["labels"]
            found[list(found)[feeder_slot(counts, number).holder]].append(labels.numpy().tobytes())
        return found

    def heldout(self, count: int) -> float:
        size, counts = self.config.micro_batch_size, tuple(h.heldout for h in self._samples.holders.values())
        batches: list[dict[str, Tensor]] = []
        slots = [feeder_slot(whole(counts, size), number) for number in range(count)]
        for holder, own in slots:
            used = size * sum(slot.holder == holder for slot in slots)
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0])))
            rows = np.sort(generator.permutation(counts[holder])[:used])
            batches.append(self._batch("heldout", sum(counts[:holder]) + rows[own * size : (own + 1) * size]))
        return reference_loss(self.module, batches)
