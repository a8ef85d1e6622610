"""A replica on an accelerator, which gives and takes on the host."""

from __future__ import annotations

import torch

from isthmus.accelerators import HOST, open_accelerator
from isthmus.data import load_dataset
from isthmus.protocol.decoupled_events import NEVER
from isthmus.runtime.decoupled.graph_trainer import GraphTrainer
from tests.decoupled.small import job_of
from tests.decoupled.test_graph_trainer import ordered


def test_a_replica_computes_the_same_on_an_accelerator() -> None:
    job = job_of(codec="none")
    run, order, kept = ordered(job, "b")
    given = list[torch.Tensor]()
    for accelerator in (HOST, open_accelerator("checked:0")):
        trainer = GraphTrainer(order, kept, load_dataset(job.data, "train"), accelerator)
        for fragment, values in enumerate(run.merged.known):
            trainer.fragments.take(fragment, values, whole=True, included=NEVER, first=True)
        trainer.step(0)
        trainer.fragments.take(0, run.merged.known[0] + 0.1, whole=True, included=NEVER, first=False)
        trainer.step(16)
        given.append(torch.cat([trainer.fragments.give(fragment, 1).view(torch.float32) for fragment in (0, 1)]))
    assert torch.allclose(given[0], given[1], rtol=1e-5, atol=1e-6)
