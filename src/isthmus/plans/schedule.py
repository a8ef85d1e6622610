"""Schedules as values: how many micro-batches each stage may hold, the order in which it prefers work, and whose turn
it is where several holders feed one chain.

A schedule fixes no global order. A stage takes the ready tasklet of highest priority, so a late message delays
what depends on it and nothing else, and no jitter can deadlock the pipeline:

    backward, then forward, then weight gradients; of one kind the lowest micro-batch first

With four stages, `1f1b` and six micro-batches, no latency and backward as long as forward:

    stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
    stage 1     F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
    stage 2        F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

`zero-bubble` is `1f1b` with backwards in two parts (Qi et al. 2023): B computes the gradients of what was received,
which the stage before waits for, and W those of the weights, when nothing else is ready. A micro-batch counts as in
flight until its W is done, so the memory is that of `1f1b`. Stages that send no gradient on, or recompute, have no W.

`delayed` is `1f1b` without a fill and a drain between steps: a step computes at the weights that the update before the
last one left (PipeDream-2BW, `training.delayed`), so its first forwards may go before the last step's last backwards:

    stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F0 B3 F1 B4 F2 B5 F3 B0
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F0 B0 F1 B1 F2 B2

Turn j of a holder with w samples, j = 0, 1, ..., is due at (2 j + 1) / w; turns come in the order in which they are
due, of several at once the first holder's first. So after any number of turns each holder has had its share of them but
for a rounding (Webster's method), all devices know it from the counts alone, and no sequence is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from isthmus.errors import InternalError, unknown_name

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "delayed")
CHOICES = (*SCHEDULES, "auto")  # choices of a job: `auto` is the quicker of `1f1b` and `zero-bubble`, by the formula
STEPS_AT_ONCE = {"delayed": 2}  # how many steps may be under way, where not one


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """`in_flight[s]`: micro-batches that stage s may hold between their forward and the end of their backward."""

    name: str
    in_flight: tuple[int, ...]
    weight_flops: tuple[int, ...] = ()
    """`zero-bubble`: of each stage's `flops_backward`, those of its W; 0 where it has none."""


def classic_in_flight(name: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Limits of the classic schedules: GPipe holds all micro-batches, 1F1B stage s holds S - s (PipeDream-flush)."""
    if name == "gpipe":
        return (micro_batches,) * stages
    if name in ("1f1b", "zero-bubble", "delayed"):
        return tuple(min(micro_batches, stages - s) for s in range(stages))
    raise unknown_name("schedule", name, SCHEDULES)


def schedule_of(asked: str, planned: str) -> str:
    """Return which schedule a plan must have whose job asks for `asked`: `auto` leaves two open."""
    return planned if asked == "auto" and planned in ("1f1b", "zero-bubble") else asked


class FeederSlot(NamedTuple):
    holder: int
    number: int  # the holder's turn, from 0


@lru_cache(maxsize=4096)
def feeder_slot(samples: tuple[int, ...], number: int) -> FeederSlot:
    """The turn with this number, from 0. Who has no samples has none. Costs no walk from turn 0."""
    had = list(had_before(samples, number))
    holder = _next(samples, had)
    return FeederSlot(holder, had[holder])


def whole(counts: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The whole micro-batches of each holder's samples."""
    return tuple(count // size for count in counts)


def had_before(samples: Sequence[int], number: int) -> list[int]:
    """Return how many of the first `number` turns each holder has."""
    total, holders = sum(samples), len(samples)
    if not total:
        raise InternalError("turns of holders none of whom has a sample")
    # All turns due by (2 number - holders) / total: these are `number` at most, and fewer by one a holder at most.
    had = [max(0, ((2 * number - holders) * count + total) // (2 * total)) for count in samples]
    while sum(had) < number:
        had[_next(samples, had)] += 1
    return had


def _next(samples: Sequence[int], had: Sequence[int]) -> int:
    best = -1
    for holder, count in enumerate(samples):
        if count and (best < 0 or (2 * had[holder] + 1) * samples[best] < (2 * had[best] + 1) * count):
            best = holder
    return best
