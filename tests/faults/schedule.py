"""What goes wrong in one run, drawn from a seed."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from isthmus.protocol import RunSpec

Kind = Literal["kill", "stall", "cut", "crash", "join", "leave", "change"]
KINDS: tuple[Kind, ...] = ("kill", "stall", "cut", "crash", "join", "leave", "change")


class Fault(msgspec.Struct, frozen=True):
    time_s: float
    kind: Kind
    device: int
    """Which one, modulo their number."""
    other: int
    """The other end of a link that is cut."""
    lasts_s: float
    """Until it is over: the device is back, the link is whole, the coordinator is started again."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    devices: int
    """In the first plan."""
    layers: int
    spares: int
    spec: RunSpec
    keep_every: int
    latency_s: float
    timeout_s: float
    faults: tuple[Fault, ...]
    repeats: bool
    """Whether joining devices get their state while the others train."""
    recalls: bool
    """Whether who was lost is waited for where too few are left."""


def drawn(seed: int) -> Schedule:
    draw = random.Random(seed)
    devices = draw.randint(1, 5)
    steps = draw.randint(3, 14)
    often = draw.choice((0.2, 1.0, 4.0))  # seconds between faults: some come in the middle of a recovery
    count = draw.randint(1, 8)
    times = sorted(draw.uniform(0.0, count * often) for _ in range(count))
    return Schedule(
        seed=seed,
        devices=devices,
        layers=draw.randint(devices, 7),
        spares=draw.randint(0, 2),
        spec=RunSpec(
            steps=steps,
            micro_batches=draw.randint(1, 3),
            micro_batch_size=2,
            save_every=draw.choice((0, 2, 5)),
            eval_every=draw.choice((0, 3)),
            eval_micro_batches=1,
            lease_ahead=draw.randint(1, 4),
        ),
        keep_every=draw.choice((0, 1, 2, 4)),
        latency_s=draw.choice((0.001, 0.05, 0.3)),
        timeout_s=3.0,
        faults=tuple(
            Fault(t, draw.choice(KINDS), draw.randrange(100), draw.randrange(100), draw.choice((0.2, 2.0, 8.0)))
            for t in times
        ),
        repeats=draw.random() < 0.5,
        recalls=draw.random() < 0.5,
    )
