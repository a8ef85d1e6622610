"""Hours of the example on the virtual clock."""

from __future__ import annotations

import msgspec
from churn import drawn

import isthmus
from isthmus.api.decoupled import simulate_decoupled
from isthmus.job import fleet_of


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    """Of the losses."""
    losses: int
    hours: float
    used: float
    """Share of the time in which devices were there that they computed steps that count."""
    undisturbed: float
    """The same without losses."""
    goodput: float
    """Merged samples over those of the same devices that never wait and are never lost."""
    merges: int
    late: int
    """Contributions that came after their merge had ended."""


def simulated(job: isthmus.Job, hours: float, seed: int) -> Simulated:
    """For so many hours of devices that are never lost."""
    full_speed, batch = simulate_decoupled(job).full_speed, job.training.batch_size
    steps = max(1, round(hours * 3600 * full_speed / batch))
    long = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=steps))
    faults = drawn(fleet_of(job).names, 2 * hours * 3600, seed)
    found = simulate_decoupled(long, faults)
    return Simulated(
        seed=seed,
        losses=sum(fault.time_s < found.run.seconds for fault in faults),
        hours=found.run.seconds / 3600,
        used=found.run.used,
        undisturbed=simulate_decoupled(long).run.used,
        goodput=found.goodput,
        merges=len(found.run.merges),
        late=found.run.late,
    )
