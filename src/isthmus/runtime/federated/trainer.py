"""An executor's client trainer, made in the process that trains."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn

from isthmus.data.clients import ClientData
from isthmus.errors import UserError
from isthmus.federated.admission import bounded, first_state
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.client_trainer import ClientTrainer, TrainingTask
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.job import FederatedJob, accelerator_of, build, client_data
from isthmus.federated.resident import Resident
from isthmus.federated.stacked import likely_shapes
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import States
from isthmus.runtime.federated.sizing import clients_each


def executor_trainer(
    job: FederatedJob,
    algorithm: Algorithm,
    module: nn.Module,
    data: ClientData,
    states: States | None,
    pacer: Pacer | None,
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


def remote_trainer(
    job: FederatedJob, fingerprint: str, number: int, states: Callable[[StateForm], States], pacer: Pacer | None
) -> ClientTrainer:
    """Return the same as `executor_trainer`, on another machine than the coordinator's, whose data have this
    fingerprint. UserError where the job cannot be trained here."""
    data = client_data(job)
    if data.fingerprint != fingerprint:
        raise UserError("data: this device has other data than the coordinator, expected the same")
    algorithm, module = job.algorithm(len(data.sizes)), build(job)
    first = first_state(algorithm, Resident(module).vector())
    kept = None if first is None else states(StateForm(first))
    return executor_trainer(job, algorithm, module, data, kept, pacer, number)


def _log(what: str) -> None:
    """An executor's process has a log of its own."""
    print(what, file=sys.stderr, flush=True)
