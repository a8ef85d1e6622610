"""One iteration on the clock: when layers become ready, and when a set of them has been averaged.

Layers are numbered in backward order here, 0 being the last of the model. The averages share one serial channel:

    compute   |-- forward --|-0-|--1--|---2---|-3-|
    channel                     |..0..|...1...| |...3...|         exposed: what sticks out
                                ready_0                           iteration = max(compute, end of the channel)

The channel starts a layer when the layer is ready and the one before is through (Eq. 7's tau). The last layer of a set
S is therefore through at max over a in S of (ready_a + the averages of S from a on), and an interval of layers costs
what its two ends say. With forward overlap the forward that follows still has `tail_a` to do from layer a on, and may
begin it when a's own average is through. Both that moment and `tail_a` grow with a, so the last layer of S decides:

    iteration = max(compute, last of S through + tail of the last)

Letting layers that the forward needs first overtake the others would hide more, but neither Gloo nor NCCL interrupts a
message. `start_s`, readiness and tail together, is what that would take: it serves the lower bound.

With several workers an average starts when the last of them is ready and lasts as long as the slowest link takes,
and all begin each iteration together. That is exact where one worker is the slowest throughout; else, as fast
workers may run ahead between averages, it is no less than the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.planners.sync.problem import WorkerProfile

Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""Share of an iteration. A smaller excess comes from the order of sums; as an exact 0 it makes ties comparable."""


@dataclass(frozen=True)
class Timeline:
    """The arrays of shape (layers,) that decide what a set of layers costs, in seconds and backward order."""

    compute_s: float  # an iteration without averaging
    ready_s: Floats  # when layer a can be averaged: never falls with a
    tail_s: Floats  # with forward overlap, the forward that waits for layer a's average, else 0: never falls with a
    average_s: Floats

    @property
    def start_s(self) -> Floats:
        """Readiness and tail of each layer. Where nothing is averaged, no more than an iteration."""
        whole_s = self.ready_s + self.tail_s
        # One worker's readiness plus another's tail may exceed both; where nothing is averaged they do not meet.
        return np.where(self.average_s > 0, whole_s, np.minimum(whole_s, self.compute_s))

    @property
    def count(self) -> int:
        return len(self.average_s)

    @property
    def elapsed_s(self) -> Floats:
        """Shape (layers + 1,): the averages of the first k layers, back to back."""
        return np.concatenate(([0.0], np.cumsum(self.average_s)))


def timeline(workers: Sequence[WorkerProfile], *, forward_overlap: bool) -> Timeline:
    """The iteration that these workers share."""
    forward = np.cumsum([w.forward_s[::-1] for w in workers], axis=1)
    ready = np.cumsum([w.backward_s[::-1] for w in workers], axis=1)
    average = np.max([w.average_s[::-1] for w in workers], axis=0)
    compute_s = float((forward[:, -1] + ready[:, -1]).max())
    if not forward_overlap:
        return Timeline(compute_s, (forward[:, -1:] + ready).max(axis=0), np.zeros_like(average), average)
    return Timeline(compute_s, ready.max(axis=0), forward.max(axis=0), average)


def iteration_s(line: Timeline, chosen: Sequence[int]) -> float:
    """Seconds of an iteration that averages the layers `chosen` (ascending numbers, which may leave gaps)."""
    layers = np.asarray(chosen, dtype=np.intp)
    layers = layers[line.average_s[layers] > 0]
    if not len(layers):
        return line.compute_s
    to_come = np.cumsum(line.average_s[layers][::-1])[::-1]
    return max(line.compute_s, float((line.ready_s[layers] + to_come).max() + line.tail_s[layers[-1]]))


def interval_exposed_s(line: Timeline) -> Floats:
    """[end, start]: exposed seconds of an iteration that averages layers start..end-1; infinite for end < start.

    Shape (layers + 1, layers + 1). The recursion of Eq. 7 unrolled: the channel is through at
    elapsed[end] + max over start <= a < end of (ready_s[a] - elapsed[a]).
    """
    lead = np.where(line.average_s > 0, line.ready_s - line.elapsed_s[:-1], -np.inf)
    return _exposed(line, _latest(line, lead))


def printed_exposed_s(line: Timeline) -> Floats:
    """Return the same as `interval_exposed_s` under Eq. 8: the next forward waits only for the first layer of a set."""
    lead = line.ready_s - line.elapsed_s[:-1]
    return _exposed(line, np.broadcast_to(lead, (line.count + 1, line.count)))


def _latest(line: Timeline, values: Floats) -> Floats:
    """[end, start]: the largest of the values start..end-1; -infinite for none. Shape (layers + 1, layers)."""
    # Running from the last start to the first makes each row's maximum over start..end-1 a cumulative one.
    found = np.where(_below_diagonal(line.count)[:, :-1], values, -np.inf)
    return np.maximum.accumulate(found[:, ::-1], axis=1)[:, ::-1]


def _exposed(line: Timeline, lead: Floats) -> Floats:
    tail = _latest(line, np.where(line.average_s > 0, line.tail_s, -np.inf))
    over = line.elapsed_s[:, None] + lead + tail - line.compute_s
    exposed = np.full((line.count + 1, line.count + 1), np.inf)
    exposed[:, :-1] = np.where(over > ROUNDING * line.compute_s, over, 0.0)
    exposed[~_below_diagonal(line.count)] = np.inf
    np.fill_diagonal(exposed, 0.0)
    return exposed


def _below_diagonal(count: int) -> NDArray[np.bool_]:
    return np.tri(count + 1, count + 1, -1, dtype=np.bool_)
