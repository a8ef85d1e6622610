"""The module that every replica and the merger begin with, and the merger's evaluation of it."""

from __future__ import annotations

import torch
from torch import nn

from isthmus.data import Dataset
from isthmus.data.dataset import any_left_out, evaluation_rows
from isthmus.graph.metrics import NO_METRICS, Metrics
from isthmus.graph.outputs import evaluate
from isthmus.job import Job
from isthmus.models import build_model
from isthmus.plans import OuterOptimizer
from isthmus.training.decoupled import MergedFragments, change_codec, flat_fragments


def seeded_model(job: Job) -> nn.Module:
    """Return the model as every replica and the merger begin with it."""
    torch.manual_seed(job.training.seed)
    return build_model(job.model)


def merged_fragments(job: Job) -> MergedFragments:
    """The merger's side at the start."""
    rules = job.sync.decoupled
    outer = OuterOptimizer(rate=rules.rate, momentum=rules.momentum)
    return MergedFragments(flat_fragments(seeded_model(job), rules.fragments), outer, change_codec(rules))


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
