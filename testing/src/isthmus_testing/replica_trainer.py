"""A replica's steps by the model's own code: the twin of `GraphTrainer`, in float32 and without dropout bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device
from isthmus.data import Dataset, batch_at, sample_order
from isthmus.data.dataset import any_left_out
from isthmus.graph.outputs import loss_and_count
from isthmus.job import Job
from isthmus.runtime.decoupled.merged_run import seeded_model
from isthmus.training.decoupled import ReplicaFragments, delta_codec, fragments_of
from isthmus.training.loss_accumulator import LossAccumulator
from isthmus.training.optim import Optimizers, clip, gradient_norms


class ReplicaTrainer:
    """Replica `number` of `count`. What it does follows from the job, and from which versions it took after how many
    steps."""

    def __init__(
        self, job: Job, data: Dataset, number: int, count: int, accelerator: Accelerator = HOST, steps: int = 0
    ) -> None:
        """`steps` were made by an earlier process."""
        self.samples = job.training.batch_size // count
        """Samples of a step."""
        self.batch = self.samples * count
        """Samples of a step of all replicas together."""
        self._micro_batch = min(self.samples, job.micro_batch_size)
        self._accelerator, self._losses = accelerator, LossAccumulator(accelerator)
        self._seed = torch.tensor(self._micro_batch / self.samples, device=accelerator.device)
        self.steps = steps
        """Steps that were made."""
        self._job, self._number = job, number
        self._data, self._columns = data, list(data.columns)
        self._uneven = any_left_out(data.columns)
        self._order = sample_order(data, job.training.seed, job.training.shuffle)
        self.module = seeded_model(job).to(accelerator.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        most = job.training.steps
        self._optimizers = Optimizers(job.optimizer, named, job.learning_rate.tabled(most), most)
        rules = job.sync.decoupled
        self.fragments = ReplicaFragments(fragments_of(self.module, rules.fragments), delta_codec(rules))

    def step(self, samples: int) -> float:
        """One step, where all replicas had trained on so many samples; returns the loss."""
        training = self._job.training
        seeds = np.random.SeedSequence([training.seed, self._number, self.steps])
        torch.manual_seed(int(seeds.generate_state(1)[0]))  # of dropout
        start = self.steps * training.batch_size + self._number * self.samples
        count = None
        for first in range(start, start + self.samples, self._micro_batch):
            batch = batch_at(self._data, self._order, first, self._micro_batch, self._columns)
            on_device = all_to_device(self._accelerator, batch)
            loss, count, _ = loss_and_count(self.module, on_device, uneven=self._uneven)
            loss.backward(self._seed if count is None else None)
            self._losses.add(loss, count)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if count is not None:
            counted = self._losses.sums()[1]
            for gradient in gradients:
                gradient.div_(counted or 1.0)
        if training.clip_norm > 0:
            clip(gradients, gradient_norms(gradients, self._accelerator.device), training.clip_norm)
        self._optimizers.step(min(samples // training.batch_size, training.steps - 1))
        self.steps += 1
        self.fragments.account.trained(self.samples)
        losses, counts = self._losses.take()
        return losses / (counts or 1.0)
