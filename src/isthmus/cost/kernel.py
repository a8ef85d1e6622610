"""The closed form of a step, over arrays of candidate plans: the one place that computes it. One plan is one row.

First axis: the candidate. A candidate has stages s on devices, and n micro-batches:

    compute[s]   FLOPs / (lambda * S*), forward and backward
    message      alpha + M / beta, of which M / beta occupies the link
    fill         sum of compute + sum of messages, there and back: one micro-batch alone
    busy         the longest that one micro-batch occupies a device, a directed link or an uplink
    trip[s]      from the start of the forward of stage s to the end of its backward: the longest path
    held[s]      floor((memory - fixed) / each): micro-batches in flight
    period       max(busy, trip[s] / held[s] of the stages that hold fewer than n)
    step         fill + (n - 1) * period + shared parameters, once
                 two steps under way at once (`delayed`): max(n * period, (longest trip + (n - 1) * busy + shared) / 2)
    price        step * rate of the devices + bytes * egress

Latency is in `fill` but not in `busy`: enough micro-batches in flight hide it. Too few throttle: a stage that holds k
micro-batches completes at most k per round trip.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.plans.schedule import STEPS_AT_ONCE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Seconds = TypeVar("Seconds", float, Floats)
AT_ONCE = STEPS_AT_ONCE["delayed"]


@dataclass(frozen=True)
class MessageTimes:
    """Times of the messages between two stages for one micro-batch, in seconds per candidate."""

    source: int
    target: int
    forward_s: Floats
    backward_s: Floats
    forward_wire_s: Floats  # `wire`: without latency
    backward_wire_s: Floats
    sent: Bools  # whether anything is: a path leads through it


def step_s(fill_s: Seconds, period_s: Seconds, micro_batches: int) -> Seconds:
    """fill + (n - 1) * period."""
    return fill_s + (micro_batches - 1) * period_s


def overlapping_step_s(trip_s: Floats, busy_s: Floats, period_s: Floats, micro_batches: int) -> Floats:
    """[candidates]: a step of `delayed`, where `trip_s` is the longest round trip and shared parameters."""
    return np.maximum(micro_batches * period_s, step_s(trip_s, busy_s, micro_batches) / AT_ONCE)


def price(step_s: Seconds, rate: Seconds, egress: Seconds) -> Seconds:
    """Every device is paid for the whole step, idle or not, and what leaves regions besides."""
    return step_s * rate + egress


def fill_s(forward_s: Floats, backward_s: Floats, messages: Sequence[MessageTimes]) -> Floats:
    """[candidates]"""
    total: Floats = (forward_s + backward_s).sum(axis=1)
    for m in messages:
        total = total + m.forward_s + m.backward_s
    return total


def hindered_s(round_trip_s: Floats, held: Floats, micro_batches: int) -> Floats:
    """[candidates, stages]: the period that the memory of each stage imposes, trip / held where held < n."""
    return np.where(held < micro_batches, round_trip_s / np.maximum(held, 1), 0.0)


def period_s(busy_s: Floats, round_trip_s: Floats, held: Floats, micro_batches: int) -> Floats:
    """[candidates]"""
    return np.maximum(busy_s, hindered_s(round_trip_s, held, micro_batches).max(axis=1))


def held(free_bytes: Floats, each_bytes: Floats, most: float) -> Floats:
    """Micro-batches in flight; `most` where one takes nothing, below 0 where the stage's state does not fit."""
    found = np.full(free_bytes.shape, most)
    np.floor_divide(free_bytes, each_bytes, out=found, where=each_bytes > 0)
    return np.where(free_bytes < 0, -1.0, found)


def device_loads(order: Ints, compute_s: Floats) -> Floats:
    """[candidates, stages]: how long the stage's device computes per micro-batch, all its stages together."""
    if not repeats(order):
        return compute_s
    same = order[:, :, None] == order[:, None, :]
    return (same * compute_s[:, None, :]).sum(axis=2)


def link_loads(order: Ints, messages: Sequence[MessageTimes]) -> list[tuple[Floats, Floats]]:
    """Per message, how long one micro-batch occupies its link there and its link back, with all that takes them."""
    own = [(m.forward_wire_s, m.backward_wire_s) for m in messages]
    if not repeats(order):
        return own
    ends = [(order[:, m.source], order[:, m.target]) for m in messages]

    def load(source: Ints, target: Ints) -> Floats:
        total = np.zeros(len(order))
        for (a, b), (there, back) in zip(ends, own, strict=True):
            total += there * ((a == source) & (b == target)) + back * ((b == source) & (a == target))
        return np.where(source == target, 0.0, total)

    return [(load(a, b), load(b, a)) for a, b in ends]


def busiest_s(
    order: Ints, compute_s: Floats, messages: Sequence[MessageTimes], uplinks_s: Sequence[Floats] = ()
) -> Floats:
    """[candidates]: the longest that one micro-batch occupies anything."""
    found: Floats = device_loads(order, compute_s).max(axis=1)
    for seconds in itertools.chain(*link_loads(order, messages), uplinks_s):
        found = np.maximum(found, seconds)
    return found


def repeats(order: Ints) -> bool:
    """Return whether a device has two stages in any candidate."""
    ordered = np.sort(order, axis=1)
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def round_trips_s(
    forward_s: Floats, backward_s: Floats, messages: Sequence[MessageTimes], apart_s: Floats | None = None
) -> Floats:
    """[candidates, stages]: messages to different stages travel at the same time. Nobody waits for weight gradients
    that are computed apart but the memory of their own stage.

    done[start, t] = max over s (done[start, s] + message(s, t)) + forward[t], and likewise back.
    """
    rows, stages = forward_s.shape
    done = np.full((rows, stages, stages), -np.inf)
    for t in range(stages):
        arrived = np.full((rows, t), -np.inf)
        for m in messages:
            if m.target == t:
                through = done[:, :t, m.source] + m.forward_s[:, None]
                arrived = np.maximum(arrived, np.where(m.sent[:, None], through, -np.inf))
        done[:, :t, t] = arrived + forward_s[:, t, None]
        done[:, t, t] = forward_s[:, t]
    for t in reversed(range(stages)):
        ended = done[:, : t + 1, t]
        for m in messages:
            if m.source == t:
                through = done[:, : t + 1, m.target] + m.backward_s[:, None]
                ended = np.maximum(ended, np.where(m.backward_s[:, None] > 0, through, -np.inf))
        done[:, : t + 1, t] = ended + backward_s[:, t, None]  # from here on the end of the backward
        if apart_s is not None:
            done[:, :t, t] -= apart_s[:, t, None]
    return np.diagonal(done, axis1=1, axis2=2).copy()
