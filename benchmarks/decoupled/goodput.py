"""Goodput under faults, simulated: useful samples over those that the same devices train on undisturbed."""

from __future__ import annotations

import random

import msgspec
from jobs import large_job_of

import isthmus
from isthmus.api.decoupled import simulate_decoupled
from isthmus.api.observer import Silent
from isthmus.api.pipeline import simulate_faults
from isthmus.simulator import Fault

LOST_PER_HOUR = 0.2
"""Of each device."""
AWAY_S = 600.0


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    seed: int
    """Of the faults."""
    faults: int
    undisturbed: float
    """Without faults."""
    disturbed: float


def schedule(names: tuple[str, ...], hours: float, seed: int) -> tuple[Fault, ...]:
    """Each device is lost at random, and could work again ten minutes later."""
    draws, found = random.Random(seed), list[Fault]()
    for name in names:
        time_s = draws.expovariate(LOST_PER_HOUR) * 3600
        while time_s < hours * 3600:
            found.append(Fault(kind="lost", device=name, time_s=time_s, lasts_s=AWAY_S))
            time_s += AWAY_S + draws.expovariate(LOST_PER_HOUR) * 3600
    return tuple(sorted(found, key=lambda fault: fault.time_s))


def goodput(mode: str, seed: int, hours: float, full_speed: float, names: tuple[str, ...]) -> Goodput:
    """Of a run that takes so many hours where no device ever waits or fails."""
    job = large_job_of(mode, hours, full_speed)
    faults = schedule(names, 2 * hours, seed)  # some modes take longer
    found = [_speed(job, faults), _speed(job, ())]
    return Goodput(
        mode=mode, seed=seed, faults=len(faults), undisturbed=found[1] / full_speed, disturbed=found[0] / full_speed
    )


def _speed(job: isthmus.Job, faults: tuple[Fault, ...]) -> float:
    """Useful samples per second."""
    if job.sync.mode == "decoupled":
        forecast = simulate_decoupled(job, faults)
        return forecast.run.useful_samples / forecast.run.seconds
    run = simulate_faults(job, faults, Silent(), isthmus.Stop())
    return run.goodput * job.training.batch_size


def full_speed_of() -> float:
    """Samples per second of all devices that never wait."""
    return simulate_decoupled(large_job_of("decoupled", 0.01, 1.0)).full_speed
