"""The steps of one replica on the whole model, on one device: its own share of the samples, its own optimizer. A
pipeline makes the same steps in the same micro-batches, with the same bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device
from isthmus.data import Dataset, batch_at, sample_order
from isthmus.data.dataset import any_left_out, evaluation_rows
from isthmus.graph.metrics import NO_METRICS, Metrics
from isthmus.graph.outputs import evaluate, loss_and_count
from isthmus.job import Job
from isthmus.models import build_model
from isthmus.plans import OuterOptimizer
from isthmus.training.decoupled import (
    MergedFragments,
    ReplicaFragments,
    change_codec,
    delta_codec,
    flat_fragments,
    fragments_of,
)
from isthmus.training.loss_accumulator import LossAccumulator
from isthmus.training.optim import Optimizers, clip, gradient_norms


def seeded_model(job: Job) -> nn.Module:
    """As every replica and the merger begin with it."""
    torch.manual_seed(job.training.seed)
    return build_model(job.model)


def merged_fragments(job: Job) -> MergedFragments:
    """The merger's side at the start."""
    rules = job.sync.decoupled
    outer = OuterOptimizer(rate=rules.rate, momentum=rules.momentum)
    return MergedFragments(flat_fragments(seeded_model(job), rules.fragments), outer, change_codec(rules))


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
        """That were made."""
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


@torch.no_grad()
def evaluated(
    module: nn.Module, data: Dataset, most: int, batch_size: int, metrics: Metrics = NO_METRICS
) -> tuple[float, dict[str, float | None]]:
    """The mean loss and the metrics of `most` held-out samples drawn at random, or of all where there are fewer.
    UserError of a metric."""
    module.eval()
    rows, columns = evaluation_rows(data, most), list(data.columns)
    batches = (data.batch(rows[start : start + batch_size], columns) for start in range(0, len(rows), batch_size))
    found = evaluate(module, batches, metrics, uneven=any_left_out(data.columns))
    module.train()
    return found
