"""A training in this process with the numbers of a plan: replicas, shares, cuts and codecs, and averages.

A replica computes its share of a step at once. That has the numbers of its micro-batches, since each is a whole number
of tiles of any dense codec.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from isthmus.data import SampleOrder, load_dataset
from isthmus.job import Prepared
from isthmus.plans import Plan, Replica

sys.path.insert(0, str(Path(__file__).parents[1] / "compression_convergence"))
from pipeline import Stages

Columns = dict[str, Tensor]


def train(prepared: Prepared, plan: Plan, every: int) -> list[float]:
    """Held-out losses, every so many steps, which is a multiple of the period of the averages."""
    job, t, size = prepared.job, prepared.job.training, plan.micro_batch_size
    assert every % plan.sync.period == 0 and not any(_is_sparse(r) for r in plan.replicas)
    replicas = [_stages(prepared, plan, number) for number in range(len(plan.replicas))]
    shares = [size * r.micro_batches for r in plan.replicas]
    data, others = load_dataset(job.data, "train"), load_dataset(job.data, "heldout")
    columns, order = list(prepared.samples.columns), SampleOrder(len(data), t.seed, True)
    held_out, losses = others.batch(range(t.eval_samples), columns), list[float]()
    for step in range(t.steps):
        start = step * t.batch_size
        for stages, share in zip(replicas, shares, strict=True):
            samples = order.indices(start, share)
            stages.step(step, [data.batch(samples, columns)], [samples.tolist()])
            start += share
        if (step + 1) % plan.sync.period == 0:
            _average(replicas, [share / t.batch_size for share in shares])
        if (step + 1) % every == 0:
            losses.append(_loss(prepared, replicas[0], held_out))
    return losses


def _is_sparse(replica: Replica) -> bool:
    packed = [c for e in replica.edges for c in (e.forward_compression, e.backward_compression)]
    return any(c is not None and c.codec == "topk" for c in packed)


def _stages(prepared: Prepared, plan: Plan, number: int) -> Stages:
    samples = plan.micro_batch_size * plan.replicas[number].micro_batches
    config = msgspec.structs.replace(prepared.job.engine(), micro_batches=1, micro_batch_size=samples)
    return Stages(prepared, plan, number, config)


def _average(replicas: list[Stages], shares: list[float]) -> None:
    found = [stages.parameters() for stages in replicas]
    mean = {n: sum((s * f[n] for s, f in zip(shares, found, strict=True)), torch.zeros(())) for n in found[0]}
    for stages in replicas:
        stages.set_parameters(mean)


@torch.no_grad()
def _loss(prepared: Prepared, stages: Stages, samples: Columns) -> float:
    """Of the model as it is."""
    module = prepared.build().eval()
    module.load_state_dict(stages.parameters(), strict=False)
    return module(**samples)["loss"].item()
