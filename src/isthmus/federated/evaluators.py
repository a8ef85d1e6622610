"""Evaluation of a federated job's model: on held-out samples, and on clients' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
import numpy as np
from torch import Tensor

from isthmus.data import DataSpec, load_dataset
from isthmus.data.clients import ClientData
from isthmus.data.dataset import NothingHeldOut, evaluation_rows
from isthmus.data.femnist import FemnistShaped
from isthmus.errors import UserError
from isthmus.federated.evaluation import Evaluator
from isthmus.federated.job import FEMNIST, FederatedJob, accelerator_of, build, client_data
from isthmus.federated.resident import Resident
from isthmus.graph.metrics import Metrics

_HELD_OUT = "held-out data (data.options.holdout above 0, or test=...) or training.eval_clients above 0"
_SITES = "[data] with held-out samples at the coordinator: sites keep their figures under masks or noise"
PERSONAL_CLIENTS = 100  # evaluated where models are personal, and the job does not say how many


def test_data(job: FederatedJob, data: ClientData | None) -> dict[str, Tensor] | None:
    """Held-out samples, at most `eval_samples`; None where the data holds none out."""
    assert job.data is not None, "there is something to evaluate on"
    most = job.training.eval_samples
    if isinstance(data, FemnistShaped):
        return data.held_out(most)
    try:
        held = load_dataset(_without(job.data, job.owner_column), "heldout")
    except NothingHeldOut:
        return None
    return held.batch(evaluation_rows(held, most), [c for c in held.columns if c != job.owner_column])


def _without(spec: DataSpec, column: str) -> DataSpec:
    """Return the data without the column that says whose a sample is: held-out samples are nobody's."""
    columns = spec.options.get("columns")
    if not isinstance(columns, Mapping):
        return spec
    wanted = {name: theirs for name, theirs in cast("Mapping[str, object]", columns).items() if name != column}
    return msgspec.structs.replace(spec, options={**spec.options, "columns": wanted})


def evaluator(job: FederatedJob, data: ClientData, *, personal: bool = False) -> Evaluator | None:
    """With a module of its own; None where nothing is evaluated. Where models are `personal`, clients are evaluated in
    any case."""
    config = job.training
    if not config.eval_every:
        return _none(job)
    population = len(data.sizes)
    wanted = config.eval_clients or (PERSONAL_CLIENTS if personal else 0)
    clients = np.unique(np.linspace(0, population - 1, min(population, wanted)).astype(int))
    chosen = clients.tolist() if wanted else []
    test = test_data(job, data)
    if test is None and not chosen:
        return _none(job)
    metrics, where = Metrics(job.metrics), lambda: accelerator_of(job, 0)
    made = Evaluator(Resident(build(job)), test, data.load, chosen, metrics=metrics, accelerator=where)
    made.check()
    return made


def site_evaluator(job: FederatedJob) -> Evaluator | None:
    """On the coordinator's own data, where it has some: the clients' are not here. UserError where metrics are asked
    for that nobody would have: sites report their own unless masks or noise cover their updates."""
    reported = job.privacy is None and not job.federated.aggregation.secure
    if reported and not (job.data is not None and job.training.eval_every):
        return None
    if not job.training.eval_every or job.data is None:
        return _none(job, _SITES)
    data = client_data(job.altered(partition=None)) if job.data.kind == FEMNIST else None
    test = test_data(job, data)
    if test is None:
        return None if reported else _none(job, _SITES)
    made = Evaluator(Resident(build(job)), test, metrics=Metrics(job.metrics))
    made.check()
    return made


def _none(job: FederatedJob, expected: str = _HELD_OUT) -> None:
    """UserError where metrics are asked for."""
    if job.metrics and not job.training.eval_every:
        raise UserError(f"metrics: got {list(job.metrics)} with training.eval_every = 0, expected 1 or more")
    if job.metrics:
        raise UserError(f"metrics: got {list(job.metrics)}, but nothing is evaluated: expected {expected}")
