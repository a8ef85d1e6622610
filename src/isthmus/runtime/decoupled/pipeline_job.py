"""A replica of several devices trains a job of its own: its share of the batch, in micro-batches of the same size as
everywhere, and in the order in which one process would take its samples."""

from __future__ import annotations

import msgspec

from isthmus.cost import SyncPolicy
from isthmus.data.replica_share import ReplicaShare
from isthmus.job import Prepared
from isthmus.rng import torch_seed
from isthmus.runtime.decoupled.groups import Groups


def pipeline_prepared(prepared: Prepared, groups: Groups, name: str) -> Prepared:
    """Return the job of one replica with the whole job's model, which is captured already: micro-batches are as large.
    The learning rate is that of the whole run's steps."""
    job, training = prepared.job, prepared.job.training
    share = ReplicaShare(
        number=list(groups).index(name),
        own=training.batch_size // len(groups),
        batch=training.batch_size,
        seed=training.seed,
        shuffle=training.shuffle,
    )
    packed = job.sync.decoupled.packed
    own = msgspec.structs.replace(
        job,
        training=msgspec.structs.replace(
            training,
            batch_size=share.own,
            micro_batches=max(1, share.own // job.micro_batch_size),
            seed=torch_seed(training.seed, 0, share.number),
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
    samples = msgspec.structs.replace(prepared.samples, train=share.samples)
    return msgspec.structs.replace(prepared, job=own, samples=samples, replica=share, shared=job.used_data)
