"""Seconds of a steady step as the simulator has them: a recurrence over the tasks of a pipeline.

A stage begins its next task as soon as its device is free and one is ready, by the rule of the schedules `1f1b` and
`gpipe` (`plans.schedule`): backward before forward, of one kind the lowest micro-batch.

    begin[s]    = max(free[s], min(arrival of the next gradient, arrival of the next activation))
    free[s]     = begin[s] + seconds of that task
    link[s, t]  = max(link[s, t], free[s]) + bytes / bandwidth,    arrival at t = link[s, t] + latency

The task that begins first is next: no later one can send anything before. A stage has done a step when all its
micro-batches are done and the gradients of its shared parameters have come. It then sends their values to the stages
that share them, which do no forward of the next step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isthmus.cost import kernel
from isthmus.cost.kernel import Bools, Floats, Ints, MessageTimes

NEVER = float("inf")
MOST_STEPS = 3  # The first fills links, and stages that wait for nobody are ahead from the second on.


@dataclass(frozen=True)
class StageTasks:
    """Pipelines of equally many stages, each on a device of its own."""

    forward_s: Floats  # [pipelines, stages]
    backward_s: Floats
    held: Floats  # [pipelines, stages]: micro-batches in flight
    messages: Sequence[MessageTimes]
    shared: Sequence[MessageTimes] = ()  # of parameters, from owner to user: values there, gradients back, once a step

    def __getitem__(self, rows: Ints) -> StageTasks:
        def some(several: Sequence[MessageTimes]) -> list[MessageTimes]:
            arrays = ({k: x[rows] for k, x in vars(m).items() if isinstance(x, np.ndarray)} for m in several)
            return [replace(m, **chosen) for m, chosen in zip(several, arrays, strict=True)]

        own = (self.forward_s[rows], self.backward_s[rows], self.held[rows])
        return StageTasks(*own, some(self.messages), some(self.shared))

    @cached_property
    def ways_s(self) -> tuple[Floats, Floats]:
        """[pipelines, stages]: of one micro-batch, from its first forward on the first stage to its arrival, and from
        the end of its backward to that on the first stage; minus infinite where no message leads there, or back."""
        head_s, tail_s = (np.full(self.forward_s.shape, -NEVER) for _ in range(2))
        head_s[:, 0] = tail_s[:, 0] = 0.0
        for m in sorted(self.messages, key=lambda m: m.target):
            a, b = m.source, m.target
            there_s = head_s[:, a] + self.forward_s[:, a] + m.forward_s
            back_s = np.where(m.backward_s > 0, tail_s[:, a] + self.backward_s[:, a] + m.backward_s, -NEVER)
            head_s[:, b] = np.maximum(head_s[:, b], np.where(m.sent, there_s, -NEVER))
            tail_s[:, b] = np.maximum(tail_s[:, b], np.where(m.sent, back_s, -NEVER))
        return head_s, tail_s

    @cached_property
    def begin_together(self) -> Bools:
        """[pipelines]: whether the first stage ends each step and begins the next, so that all steps are alike."""
        head_s, tail_s = self.ways_s
        other = [m.sent for m in self.shared if m.source]  # it sends their values when it is done itself
        return np.isfinite(head_s + tail_s).all(axis=1) & ~np.any([np.zeros(len(head_s), dtype=bool), *other], axis=0)


def steady_step_s(tasks: StageTasks, row: int, micro_batches: int) -> float:
    """How much later a step of this pipeline ends than the one before it."""
    steps = 1 if tasks.begin_together[row] else MOST_STEPS
    ended_s = _Recurrence(tasks, row, micro_batches, steps).run()
    return ended_s[-1] - (ended_s[-2] if steps > 1 else 0.0)


def least_step_s(tasks: StageTasks, micro_batches: int) -> Floats:
    """[pipelines]: what no steady step undercuts, and half of them take.

    From the first forward on the first stage to the last backward there, a stage or link between them is busy for n
    micro-batches, after the way there and before the way back:

        head[s] + n * (F[s] + B[s]) + tail[s],    head[s] + ceil(n / held[s]) * trip[s] + tail[s]

    `trip[s]` is a micro-batch's time from its forward on a stage to the end of its backward there.
    """
    forward_s, backward_s = tasks.forward_s, tasks.backward_s
    trip_s = kernel.round_trips_s(forward_s, backward_s, tasks.messages)
    head_s, tail_s = (x.copy() for x in tasks.ways_s)
    for m in (m for m in tasks.shared if m.source == 0):
        # Users of its parameters begin when the values are there, and the step ends when all gradients have come back.
        head_s[:, m.target] = np.maximum(head_s[:, m.target], np.where(m.sent, m.forward_s, -NEVER))
        tail_s[:, m.target] = np.maximum(tail_s[:, m.target], np.where(m.sent, m.backward_s, -NEVER))
    around = np.isfinite(head_s) & np.isfinite(tail_s)  # else it may work on another step than the first stage
    head_s, tail_s = np.where(around, head_s, 0.0), np.where(around, tail_s, 0.0)
    turns = np.where(tasks.held < micro_batches, np.ceil(micro_batches / np.maximum(tasks.held, 1)), 1.0)
    busy_s = np.maximum(micro_batches * (forward_s + backward_s), turns * trip_s)
    least_s: Floats = (head_s + busy_s + tail_s).max(axis=1)
    for m in tasks.messages:
        a, b, more = m.source, m.target, micro_batches - 1
        once_s = head_s[:, a] + forward_s[:, a] + m.forward_s + trip_s[:, b]
        once_s += m.backward_s + backward_s[:, a] + tail_s[:, a]
        longer_s = more * np.maximum(m.forward_wire_s, m.backward_wire_s)
        both = m.sent & (m.backward_s > 0)
        least_s = np.maximum(least_s, np.where(both, once_s + longer_s, more * m.forward_wire_s))
    return least_s


class _Way(NamedTuple):
    """Messages of one kind from one stage to another."""

    target: int
    link: int
    wire_s: float
    latency_s: float


class _Inbox:
    """Arrivals at a stage by micro-batch or step: when the last one came, and how many are missing."""

    __slots__ = ("latest_s", "missing")

    def __init__(self, missing: int, numbers: int) -> None:
        self.missing, self.latest_s = [missing] * numbers, [0.0] * numbers


class _Recurrence:
    """One pipeline. Lists are by stage."""

    def __init__(self, tasks: StageTasks, row: int, each: int, steps: int) -> None:
        self._each, self._steps, self._stages = each, steps, range(tasks.forward_s.shape[1])
        self._forward_s, self._backward_s = tasks.forward_s[row].tolist(), tasks.backward_s[row].tolist()
        self._held = tasks.held[row].tolist()
        self._links_s = [0.0] * len(self._stages) ** 2
        self._forward_ways, self._forward = self._ways(tasks.messages, row, each * steps, back=False)
        self._backward_ways, self._backward = self._ways(tasks.messages, row, each * steps, back=True)
        self._value_ways, self._values = self._ways(tasks.shared, row, steps, back=False)
        self._gradient_ways, self._gradients = self._ways(tasks.shared, row, steps, back=True)
        for inbox in self._backward:  # its own forward too
            inbox.missing = [missing + 1 for missing in inbox.missing]
        self._forwards, self._backwards, self._step = ([0 for _ in self._stages] for _ in range(3))
        self._free_s, self._begin_s = ([0.0 for _ in self._stages] for _ in range(2))
        self._is_backward = [False for _ in self._stages]
        self._ended_s = [0.0] * steps

    def _ways(
        self, messages: Sequence[MessageTimes], row: int, numbers: int, *, back: bool
    ) -> tuple[list[list[_Way]], list[_Inbox]]:
        ways: list[list[_Way]] = [[] for _ in self._stages]
        missing = [0 for _ in self._stages]
        for m in messages:
            source, target = (m.target, m.source) if back else (m.source, m.target)
            seconds, wire_s = (m.backward_s, m.backward_wire_s) if back else (m.forward_s, m.forward_wire_s)
            if m.sent[row] and (not back or seconds[row] > 0):
                link = source * len(self._stages) + target
                ways[source].append(_Way(target, link, float(wire_s[row]), float(seconds[row] - wire_s[row])))
                missing[target] += 1
        return ways, [_Inbox(count, numbers) for count in missing]

    def run(self) -> list[float]:
        """When each step ends."""
        begin_s, each = self._begin_s, self._each
        for stage in self._stages:
            self._send(self._value_ways[stage], self._values, 0.0, 0)
        for stage in self._stages:
            self._look(stage)
        while (now_s := min(begin_s)) < NEVER:
            stage = begin_s.index(now_s)
            if self._backwards[stage] == each:
                self._end(stage, now_s)
            elif self._is_backward[stage]:
                self._do_backward(stage, now_s)
            else:
                number = self._step[stage] * each + self._forwards[stage]
                end_s = self._free_s[stage] = now_s + self._forward_s[stage]
                self._forwards[stage] += 1
                own = self._backward[stage]
                own.missing[number] -= 1
                own.latest_s[number] = max(own.latest_s[number], end_s)
                self._send(self._forward_ways[stage], self._forward, end_s, number)
            self._look(stage)
        return self._ended_s

    def _do_backward(self, stage: int, now_s: float) -> None:
        step = self._step[stage]
        end_s = self._free_s[stage] = now_s + self._backward_s[stage]
        self._send(self._backward_ways[stage], self._backward, end_s, step * self._each + self._backwards[stage])
        self._backwards[stage] += 1
        if self._backwards[stage] == self._each:
            self._send(self._gradient_ways[stage], self._gradients, end_s, step)

    def _end(self, stage: int, now_s: float) -> None:
        """The step is done here; the next one begins, if there is one."""
        step = self._step[stage]
        self._ended_s[step] = max(self._ended_s[step], now_s)
        self._step[stage], self._forwards[stage], self._backwards[stage] = step + 1, 0, 0
        self._free_s[stage] = now_s
        if step + 1 < self._steps:
            self._send(self._value_ways[stage], self._values, now_s, step + 1)

    def _send(self, ways: Sequence[_Way], inboxes: Sequence[_Inbox], now_s: float, number: int) -> None:
        links_s = self._links_s
        for target, link, wire_s, latency_s in ways:
            left_s = links_s[link] = max(links_s[link], now_s) + wire_s
            inbox = inboxes[target]
            inbox.latest_s[number] = max(inbox.latest_s[number], left_s + latency_s)
            inbox.missing[number] -= 1
            if not inbox.missing[number]:
                self._look(target)

    def _look(self, stage: int) -> None:
        """When the stage begins its next task, and which."""
        step, forwards, backwards = self._step[stage], self._forwards[stage], self._backwards[stage]
        ready_s = NEVER
        if step == self._steps:
            pass
        elif backwards == self._each:
            inbox = self._gradients[stage]
            ready_s = NEVER if inbox.missing[step] else inbox.latest_s[step]
        else:
            first = step * self._each
            inbox = self._backward[stage]
            backward_s = NEVER if inbox.missing[first + backwards] else inbox.latest_s[first + backwards]
            if forwards < self._each and forwards - backwards < self._held[stage]:
                inbox, values = self._forward[stage], self._values[stage]
                if not inbox.missing[first + forwards] and not values.missing[step]:
                    ready_s = max(inbox.latest_s[first + forwards], values.latest_s[step])
            ready_s = min(ready_s, backward_s)
            self._is_backward[stage] = backward_s <= max(self._free_s[stage], ready_s)
        self._begin_s[stage] = max(self._free_s[stage], ready_s)
