"""A replica of several devices trains a job of its own: its share of the batch, in micro-batches of the same size as
everywhere, and in the order in which one process would take its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from torch import Tensor

from isthmus.cost import SyncPolicy
from isthmus.data import Dataset, DataSpec, batch_at, load_dataset, sample_order
from isthmus.data.dataset import Indices, SamplesOf, joined
from isthmus.job import Job, Prepared
from isthmus.rng import torch_seed
from isthmus.runtime.decoupled.groups import Groups

MOST_STEPS = 1 << 32  # steps of a replica for which there are samples: more than any run has


def pipeline_job(job: Job, groups: Groups, name: str) -> Job:
    """Return the job of one replica. Its learning rate is that of the whole run's steps."""
    training, packed = job.training, job.sync.decoupled.packed
    number, count = list(groups).index(name), len(groups)
    own = training.batch_size // count
    share = {"data": job.used_data, "number": number, "own": own, "batch": training.batch_size}
    order = {"seed": training.seed, "shuffle": training.shuffle}
    return msgspec.structs.replace(
        job,
        data=DataSpec(kind=f"{__name__}:replica_data", options=msgspec.to_builtins(share | order)),
        training=msgspec.structs.replace(
            training,
            batch_size=own,
            micro_batches=max(1, own // job.micro_batch_size),
            seed=torch_seed(training.seed, 0, number),
            shuffle=False,
            eval_every=0,
            save_every=0,
            keep_checkpoints=1,
        ),
        # A step is opened when the one before is over: only then is it known what comes with it.
        runtime=msgspec.structs.replace(job.runtime, lease_ahead=1, fingerprints=False, audit=0.0),
        sync=SyncPolicy(),
        compression=job.compression if not packed or name in packed else None,
        callback=(),
        store=None,
    )


def pipeline_prepared(prepared: Prepared, groups: Groups, name: str) -> Prepared:
    """The same with its model, which is captured already: micro-batches are those of the whole job."""
    job = pipeline_job(prepared.job, groups, name)
    samples = msgspec.structs.replace(prepared.samples, train=MOST_STEPS * job.training.batch_size)
    return msgspec.structs.replace(prepared, job=job, samples=samples)


class ReplicaData(SamplesOf):
    """The samples of one replica, step after step: a data set for its devices."""

    def __init__(self, dataset: Dataset, *, number: int, own: int, batch: int, seed: int, shuffle: bool) -> None:
        """`own`: samples of one of its steps, of `batch`."""
        super().__init__(dataset)
        self._order = sample_order(self._dataset, seed, shuffle)
        self._number, self._own, self._batch = number, own, batch

    def __len__(self) -> int:
        return MOST_STEPS * self._own

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, Tensor]:
        steps, offsets = np.divmod(np.asarray(indices, dtype=np.int64), self._own)
        positions = steps * self._batch + self._number * self._own + offsets
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        parts = [batch_at(self._dataset, self._order, int(s[0]), len(s), columns) for s in stretches]
        return parts[0] if len(parts) == 1 else joined(parts)


def replica_data(
    *,
    split: Literal["train", "heldout"],
    data: dict[str, object],
    number: int,
    own: int,
    batch: int,
    seed: int,
    shuffle: bool,
) -> ReplicaData:
    """`ReplicaData` from what JSON can hold."""
    dataset = load_dataset(msgspec.convert(data, DataSpec), split)
    return ReplicaData(dataset, number=number, own=own, batch=batch, seed=seed, shuffle=shuffle)
