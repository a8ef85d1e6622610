"""Schedules as values: how many micro-batches each stage may hold, and the order in which it prefers work.

A schedule fixes no global order. A stage takes the ready tasklet of highest priority, so a late message delays
what depends on it and nothing else, and no jitter can deadlock the pipeline:

    backward before forward, then the lowest micro-batch first

With four stages, `1f1b` and six micro-batches, no latency and backward as long as forward:

    stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
    stage 1     F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
    stage 2        F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from isthmus.errors import unknown_name

SCHEDULES = ("gpipe", "1f1b")


class Tasklet(NamedTuple):
    """DT-FM's t_ij, split in two: the forward (F) or backward (B) of one micro-batch on one stage.

    Tuples order by priority: B before F, then the lower micro-batch.
    """

    kind: Literal["B", "F"]
    micro_batch: int


class Schedule(msgspec.Struct, frozen=True):
    """`in_flight[s]`: micro-batches that stage s may hold between their forward and their backward."""

    name: str
    in_flight: tuple[int, ...]


def classic_in_flight(name: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Limits of the classic schedules: GPipe holds all micro-batches, 1F1B stage s holds S - s (PipeDream-flush)."""
    if name == "gpipe":
        return (micro_batches,) * stages
    if name == "1f1b":
        return tuple(min(micro_batches, stages - s) for s in range(stages))
    raise unknown_name("schedule", name, SCHEDULES)
