"""Which devices train one replica, by the job."""

from __future__ import annotations

from collections import Counter

import msgspec

from isthmus.cost import SyncPolicy
from isthmus.data.replica_share import ReplicaShare
from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared
from isthmus.rng import torch_seed

Groups = dict[str, tuple[str, ...]]
"""The devices of each replica in the fleet's order, by its name. A replica of one device has that device's name."""
FIELD = "sync.decoupled.replicas"


def replica_groups(job: Job, fleet: Fleet) -> Groups:
    """In the order of the fleet's devices. UserError for lists that are not a partition of the fleet."""
    asked = job.sync.decoupled.replicas
    if asked == "devices":
        return {name: (name,) for name in fleet.names}
    if asked == "regions":
        found: dict[str, list[str]] = {}
        for device in fleet.devices:
            found.setdefault(device.region, []).append(device.name)
        return {_name(devices, region): tuple(devices) for region, devices in found.items()}
    named = Counter(name for group in asked for name in group)
    for name, count in named.items():
        if name not in fleet.names:
            raise UserError(f"{FIELD}: {unknown_name('device', name, fleet.names)}")
        if count > 1:
            raise UserError(f"{FIELD}: got {name!r} {count} times, expected each device once")
    if missing := [name for name in fleet.names if name not in named]:
        raise UserError(f"{FIELD}: got no replica for {', '.join(missing)}, expected each device in one")
    if not all(asked):
        raise UserError(f"{FIELD}: got an empty list, expected at least one device in each")
    groups = sorted((sorted(group, key=fleet.names.index) for group in asked), key=lambda g: fleet.names.index(g[0]))
    return {_name(group, "+".join(group)): tuple(group) for group in groups}


def _name(devices: list[str], several: str) -> str:
    return several if len(devices) > 1 else devices[0]


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
