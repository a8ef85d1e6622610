"""An executor's client trainer, made in the process that trains."""

from __future__ import annotations

import sys

from torch import nn

from isthmus.data.clients import ClientData
from isthmus.federated.admission import bounded
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.client_trainer import ClientTrainer, TrainingTask
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.job import FederatedJob, accelerator_of
from isthmus.federated.stacked import likely_shapes
from isthmus.federated.states import States
from isthmus.runtime.federated.sizing import clients_each


def executor_trainer(
    job: FederatedJob,
    algorithm: Algorithm,
    module: nn.Module,
    data: ClientData,
    states: States | None,
    pacer: Pacer,
    number: int,
) -> ClientTrainer:
    """Return the trainer of executor `number`, ready to train. UserError for a device that is not here, a model that
    does not take the data."""
    rounds = job.federated.rounds
    trainer = ClientTrainer(
        TrainingTask(algorithm=algorithm, local=job.local.tabled(rounds), seed=job.training.seed, rounds=rounds),
        module,
        data,
        states,
        pacer=pacer,
        admit=None if job.bounds.max_norm is None else lambda update: bounded(update, job.bounds, algorithm.change),
        log=_log,
        accelerator=accelerator_of(job, number),
    )
    sizes, together = data.sizes, job.runtime.clients_per_vmap
    each = clients_each(job, len(sizes))
    trainer.warm_up(shapes=likely_shapes(sizes, each, together, job.local.batch_size) if together > 1 else ())
    return trainer


def _log(what: str) -> None:
    """An executor's process has a log of its own."""
    print(what, file=sys.stderr, flush=True)
