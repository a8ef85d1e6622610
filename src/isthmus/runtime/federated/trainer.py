"""An executor's client trainer, made in the process that trains.

How many executors a run takes and how many clients each trains together, where the job leaves it to a measurement.

Everything is measured in copies of this process: with an accelerator, training starts threads and a context, and then
executors cannot be forked.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from torch import nn

from isthmus.accelerators import AUTO, Accelerator
from isthmus.accelerators.copies import all_to_device
from isthmus.copies import asked, asked_at_once
from isthmus.data import ColumnSpec
from isthmus.data.clients import ClientData
from isthmus.data.dataset import any_left_out, may_be_left_out
from isthmus.errors import UserError, users_code
from isthmus.extensions import import_object
from isthmus.federated.admission import bounded, first_state
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.client_costs import ClientCosts, client_costs
from isthmus.federated.client_trainer import ClientTrainer, TrainingTask
from isthmus.federated.emulated_speed import DevicePacer, Pacer, transfer_s
from isthmus.federated.job import FederatedJob, accelerator_of, build, client_data, emulation, executors
from isthmus.federated.local import LocalConfig
from isthmus.federated.resident import Batch, Resident, pieces_of
from isthmus.federated.stacked import best_clients_per_vmap, get_ready, likely_shapes
from isthmus.federated.states import StateForm, States
from isthmus.graph.captured import Capture, Column
from isthmus.graph.label_means import is_even, own_mean
from isthmus.models import as_eager
from isthmus.run_files import JOB, read_job

FIELD = "training.micro_batches"


def own_mean_of(
    build: Callable[[], nn.Module], columns: Mapping[str, ColumnSpec], local: LocalConfig, *, forks: bool = True
) -> str:
    """Empty where nothing is to be said. The model is captured in a copy of this process where that `forks`."""
    count = pieces_of(local.batch_size, local.micro_batches)
    if count == 1:
        return ""
    try:
        question = partial(_is_even, build, columns, local.batch_size // count)
        even = asked(question, bool) if forks else question()
    except UserError as e:
        return (
            f"{FIELD}: got {local.micro_batches}, and whether the model's loss is the same with each number cannot be "
            f"read off its graph: {e}"
        )
    return "" if even else own_mean(count, FIELD)


def _is_even(build: Callable[[], nn.Module], columns: Mapping[str, ColumnSpec], size: int) -> bool:
    # Imported when it is needed: torch.export takes seconds.
    capture = cast("Capture", import_object("isthmus", "isthmus.graph.capture:capture"))
    wanted = {name: Column(c.dtype, c.shape, may_be_left_out(c)) for name, c in columns.items()}
    model = build()  # only now is its library imported
    with as_eager(wanted):
        found = capture(lambda: model, wanted, batch=size)
    return is_even(found.train, uneven=any_left_out(columns))


def counted_costs(job: FederatedJob, data: ClientData) -> ClientCosts:
    """Return the same as `client_costs`, in a copy of this process: a process that has trained cannot be copied any
    more."""
    return asked(lambda: client_costs(job, data), ClientCosts)


def pacers(job: FederatedJob, data: ClientData, executors: int) -> Callable[[int], Pacer]:
    """Executor's number -> its pacer. UserError for devices of the fleet that are too small, or FLOPs that cannot be
    counted."""
    fleet = job.executor_fleet(executors)
    if fleet is None:
        return lambda number: Pacer(emulation(job, number).clock())
    costs = counted_costs(job, data)
    fleet.check_memory(costs.memory_bytes)

    def pacer(number: int) -> Pacer:
        flops_per_s = fleet.flops_per_s(number)

        def client_s(samples: int, pass_: int) -> float:
            return costs.passes[pass_].flops * job.local.used(samples) / flops_per_s

        return DevicePacer(
            client_s,
            emulation(job, number),
            receive_s=partial(transfer_s, fleet.incoming(number)),
            send_s=partial(transfer_s, fleet.outgoing(number)),
        )

    return pacer


GAIN = 1.1  # twice the executors must be so much faster, or they are not used
MEASURED_S = 0.4
CONTEXT_BYTES = {"cuda": 600 << 20}
"""Bytes that a process's context takes on a device before it allocates anything; none are known for other kinds."""
KEPT_FREE = 0.1


def clients_each(job: FederatedJob, population: int) -> int:
    """Return how many clients an executor has in a round, where all have as many."""
    return math.ceil(job.federated.participation.needed(population) / executors(job, population))


def sized(job: FederatedJob, data: ClientData, before: Path | None = None, *, forks: bool = True) -> FederatedJob:
    """The job with numbers in place of 0. How many clients are trained together is measured once, as other bits would
    follow from another number: a run that is resumed takes the one that it began with, from its folder `before`.
    Clients with optimizers or clipped gradients are trained one by one: each has a state and norms of its own.
    Without `forks` executors are elsewhere, so many as the job says. UserError for a device that is not here."""
    if forks and job.devices not in ((AUTO,), ("cpu",)):
        asked(lambda: sum(accelerator_of(job, number).asynchronous for number in range(len(job.devices))), int)
    job = with_executors(job, data) if forks else job
    if not job.local.is_plain:
        return _with(job, clients_per_vmap=1)
    clients_per_vmap = job.runtime.clients_per_vmap
    if clients_per_vmap != 1:
        get_ready()
    if before is not None and (before / JOB).is_file():
        clients_per_vmap = _begun(before).runtime.clients_per_vmap
    elif not clients_per_vmap:
        measured = partial(_measured_clients_per_vmap, job, data)
        clients_per_vmap = asked(measured, int) if forks else measured()
    return _with(job, clients_per_vmap=clients_per_vmap)


def with_executors(job: FederatedJob, data: ClientData) -> FederatedJob:
    """The job with a number of executors in place of 0: one on each device of its fleet; else as many as memory and
    cores hold, and as train faster together."""
    if not job.runtime.executors and (fleet := job.executor_fleet(0)) is not None:
        return _with(job, executors=len(fleet.devices))
    if job.runtime.executors:
        return job
    return _with(job, executors=_measured_executors(job, data))


def _with(job: FederatedJob, **changes: int) -> FederatedJob:
    return msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, **changes))


def _begun(run: Path) -> FederatedJob:
    """The job that the run began with. UserError for a file that is none: a run of another kind, say."""
    try:
        return read_job(run, FederatedJob, f"{run / JOB}: holds no federated job")
    except FileNotFoundError:
        raise UserError(f"{run / JOB}: holds no federated job: not found") from None


def _measured_executors(job: FederatedJob, data: ClientData) -> int:
    accumulator = asked(lambda: _room(job, data), int) * len(job.devices)
    cores = max(1, (os.cpu_count() or 1) // job.runtime.threads)

    def rate(count: int) -> float:
        return sum(asked_at_once([lambda k=k: _steps_per_1000_s(job, data, k) for k in range(count)], int))

    return fastest_count(rate, max(1, min(accumulator, cores, job.federated.participation.needed(len(data.sizes)))))


def fastest_count(rate: Callable[[int], float], most: int) -> int:
    """Return how many at once have the highest rate: doubled from 1 as long as that gains, up to `most`."""
    found, found_rate = 1, rate(1) if most > 1 else 0.0
    while found < most:
        count = min(2 * found, most)
        if (got := rate(count)) < found_rate * GAIN:
            break
        found, found_rate = count, got
    return found


def _room(job: FederatedJob, data: ClientData) -> int:
    """Return how many executors one accelerator's memory holds."""
    accelerator = accelerator_of(job, 0)
    if not accelerator.asynchronous:
        return os.cpu_count() or 1
    free = accelerator.memory().free
    _train(job, data, accelerator, 1)
    context = CONTEXT_BYTES.get(accelerator.device.type, 0)
    needed = accelerator.memory().peak_reserved + context
    return max(1, int((1 - KEPT_FREE) * (free + context) / needed))


def _steps_per_1000_s(job: FederatedJob, data: ClientData, executor: int) -> int:
    return _train(job, data, accelerator_of(job, executor), math.inf)


def _train(job: FederatedJob, data: ClientData, accelerator: Accelerator, most: float) -> int:
    """Steps on a batch per 1000 s, for `MEASURED_S` and `most` steps at most; the first step does not count."""
    resident, columns = _one_batch(job, data, accelerator)
    weights = resident.vector()
    resident.descend(weights, columns, 0.0, out=weights)
    accelerator.synchronize()
    start_s, steps = time.perf_counter(), 0
    while steps < most and time.perf_counter() < start_s + MEASURED_S:
        resident.descend(weights, columns, 0.0, out=weights)
        accelerator.synchronize()
        steps += 1
    return round(1000 * steps / (time.perf_counter() - start_s))


def _measured_clients_per_vmap(job: FederatedJob, data: ClientData) -> int:
    resident, columns = _one_batch(job, data, accelerator_of(job, 0))
    return best_clients_per_vmap(resident, columns, clients_each(job, len(data.sizes)))


def _one_batch(job: FederatedJob, data: ClientData, accelerator: Accelerator) -> tuple[Resident, Batch]:
    """A batch of a client of median size. UserError for a model that does not take it."""
    resident = Resident(build(job), accelerator, job.local.computes)
    client = int(np.argsort(data.sizes)[len(data.sizes) // 2])
    few = {name: column[: job.local.batch_size] for name, column in data.load(client).items()}
    cast = {name: c.to(resident.computes) if c.dtype.is_floating_point else c for name, c in few.items()}
    columns = all_to_device(accelerator, cast)
    with users_code(resident.given(f"client {client}'s", few)):
        weights = resident.vector()
        resident.descend(weights, columns, 0.0, out=weights)
    return resident, columns


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
