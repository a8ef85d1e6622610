"""A replica on an accelerator: it computes there, and gives and takes on the host."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.accelerators import HOST, open_accelerator
from isthmus.data import load_dataset
from isthmus.protocol.decoupled_events import NEVER
from isthmus.protocol.run_messages import Item, OpenItem, WeightExchange
from isthmus.runtime.decoupled.device_replica import GraphTrainer
from isthmus.runtime.decoupled.merged_run import seeded_model
from isthmus.runtime.device.weight_exchange import OpenedExchange, StageExchanges
from isthmus.training.decoupled import flat_fragments
from isthmus.training.engine import TorchEngine
from isthmus_testing.replica_trainer import ReplicaTrainer
from tests.decoupled.small import job_of
from tests.decoupled.test_graph_trainer import ordered


@pytest.mark.long
def test_a_replica_computes_the_same_on_an_accelerator() -> None:
    job = job_of(codec="none")
    run, order, kept = ordered(job, "b")
    given = list[torch.Tensor]()
    for accelerator in (HOST, open_accelerator("checked:0")):
        trainer = GraphTrainer(order, kept, load_dataset(job.used_data, "train"), accelerator)
        for fragment, values in enumerate(run.merged.known):
            trainer.fragments.take(fragment, values, whole=True, included=NEVER, first=True)
        trainer.step(0)
        trainer.fragments.take(0, run.merged.known[0] + 0.1, whole=True, included=NEVER, first=False)
        trainer.step(16)
        given.append(torch.cat([trainer.fragments.give(fragment, 1).view(torch.float32) for fragment in (0, 1)]))
    assert torch.allclose(given[0], given[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_so_does_one_that_has_the_models_code(clip_norm: float) -> None:
    job = job_of(codec="none")
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, clip_norm=clip_norm))
    data, losses, given = load_dataset(job.used_data, "train"), list[list[float]](), list[Tensor]()
    for accelerator in (HOST, open_accelerator("checked:0")):
        trainer = ReplicaTrainer(job, data, 0, 2, accelerator)
        for fragment, values in enumerate(flat_fragments(seeded_model(job), 2)):
            trainer.fragments.take(fragment, values, whole=True, included=NEVER, first=True)
        losses.append([trainer.step(16 * step) for step in range(3)])
        given.append(torch.cat([trainer.fragments.give(fragment, 1).view(torch.float32) for fragment in (0, 1)]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.allclose(given[0], given[1], rtol=1e-5, atol=1e-6)


def test_a_stage_on_an_accelerator_adds_what_was_merged() -> None:
    _, order, kept = ordered(job_of(codec="none"), "b")
    assignment, reads = order.assignment, list[Mapping[str, Tensor]]()
    trained = {name: torch.zeros(shape) for fragment in order.fragments for name, shape in fragment.items()}
    engine = TorchEngine(
        assignment.train,
        assignment.evaluation,
        assignment.engine,
        {**kept, **trained},
        accelerator=open_accelerator("checked:0"),
    )
    exchanges = StageExchanges(engine, assignment.train, 1, lambda _, weights: reads.append(weights))
    item = Item(index=0, kind="train", step=0)
    amounts = {name: torch.full((value.numel(),), 0.5) for name, value in trained.items()}
    exchange = WeightExchange(rate_step=0, wanted=tuple(trained))
    exchanges.opened(OpenedExchange(OpenItem(item=item, epoch=0), exchange, amounts))
    exchanges.begin(0)
    assert all(bool((value.to("cpu") == 0.5).all()) for value in reads[0].values())
    assert all(not value.to("cpu").any() for value in exchanges.before.values())
