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


class _Messages:
    """Messages of one kind. Lists are by stage."""

    __slots__ = ("awaited", "latest_s", "missing", "ways")

    def __init__(self, messages: Sequence[MessageTimes], row: int, stages: int, numbers: int, *, back: bool) -> None:
        """`numbers` of them go each way, one for each micro-batch or step."""
        self.ways: list[list[_Way]] = [[] for _ in range(stages)]
        missing = [0] * stages
        for m in messages:
            source, target = (m.target, m.source) if back else (m.source, m.target)
            seconds, wire_s = (m.backward_s, m.backward_wire_s) if back else (m.forward_s, m.forward_wire_s)
            if m.sent[row] and (not back or seconds[row] > 0):
                link = source * stages + target
                self.ways[source].append(_Way(target, link, float(wire_s[row]), float(seconds[row] - wire_s[row])))
                missing[target] += 1
        self.missing = [[count] * numbers for count in missing]  # how many of each number have not come
        self.latest_s = [[0.0] * numbers for _ in missing]  # when the last one came
        self.awaited = [0] * stages  # the number that is taken next


class _Recurrence:
    """One pipeline. Lists are by stage."""

    def __init__(self, tasks: StageTasks, row: int, each: int, steps: int) -> None:
        stages = tasks.forward_s.shape[1]
        self._each, self._steps = each, steps
        self._forward_s, self._backward_s = tasks.forward_s[row].tolist(), tasks.backward_s[row].tolist()
        self._held = tasks.held[row].tolist()
        self._links_s = [0.0] * stages**2
        self._forward = _Messages(tasks.messages, row, stages, each * steps, back=False)
        self._backward = _Messages(tasks.messages, row, stages, each * steps, back=True)
        self._values = _Messages(tasks.shared, row, stages, steps, back=False)
        self._gradients = _Messages(tasks.shared, row, stages, steps, back=True)
        # A backward waits for its own forward too.
        self._backward.missing = [[count + 1 for count in missing] for missing in self._backward.missing]
        self._ends = [each] * stages  # micro-batches of all steps up to this one
        self._free_s, self._begin_s = [0.0] * stages, [0.0] * stages
        self._is_backward = [False] * stages
        self._ended_s = [0.0] * steps

    def run(self) -> list[float]:
        """When each step ends."""
        begin_s, forward, backward = self._begin_s, self._forward, self._backward
        for stage in range(len(begin_s)):
            self._send(self._values, stage, 0.0, 0)
        for stage in range(len(begin_s)):
            self._look(stage)
        while (now_s := min(begin_s)) < NEVER:
            stage = begin_s.index(now_s)
            if backward.awaited[stage] == self._ends[stage]:
                self._end(stage, now_s)
            elif self._is_backward[stage]:
                number = backward.awaited[stage]
                end_s = self._free_s[stage] = now_s + self._backward_s[stage]
                backward.awaited[stage] = number + 1
                self._send(backward, stage, end_s, number)
                if number + 1 == self._ends[stage]:
                    self._send(self._gradients, stage, end_s, number // self._each)
            else:
                number = forward.awaited[stage]
                end_s = self._free_s[stage] = now_s + self._forward_s[stage]
                forward.awaited[stage] = number + 1
                backward.missing[stage][number] -= 1
                backward.latest_s[stage][number] = max(backward.latest_s[stage][number], end_s)
                self._send(forward, stage, end_s, number)
            self._look(stage)
        return self._ended_s

    def _end(self, stage: int, now_s: float) -> None:
        """The step is done here; the next one begins, if there is one."""
        step = self._gradients.awaited[stage]
        self._ended_s[step] = max(self._ended_s[step], now_s)
        self._values.awaited[stage] = self._gradients.awaited[stage] = step + 1
        self._ends[stage] += self._each
        self._free_s[stage] = now_s
        if step + 1 < self._steps:
            self._send(self._values, stage, now_s, step + 1)

    def _send(self, messages: _Messages, stage: int, now_s: float, number: int) -> None:
        links_s = self._links_s
        for target, link, wire_s, latency_s in messages.ways[stage]:
            left_s = links_s[link] = max(links_s[link], now_s) + wire_s
            latest_s, missing = messages.latest_s[target], messages.missing[target]
            latest_s[number] = max(latest_s[number], left_s + latency_s)
            missing[number] -= 1
            if not missing[number] and number == messages.awaited[target]:
                self._look(target)

    def _look(self, stage: int) -> None:
        """When the stage begins its next task, and which."""
        backward, end = self._backward, self._ends[stage]
        back, ready_s, free_s = backward.awaited[stage], NEVER, self._free_s[stage]
        step = self._gradients.awaited[stage]
        if step == self._steps:
            pass
        elif back == end:
            ready_s = NEVER if self._gradients.missing[stage][step] else self._gradients.latest_s[stage][step]
        else:
            backward_s = NEVER if backward.missing[stage][back] else backward.latest_s[stage][back]
            number = self._forward.awaited[stage]
            if number < end and number - back < self._held[stage] and not self._forward.missing[stage][number]:
                values = self._values
                if not values.missing[stage][step]:
                    ready_s = max(self._forward.latest_s[stage][number], values.latest_s[stage][step])
            ready_s = min(ready_s, backward_s)
            self._is_backward[stage] = backward_s <= max(free_s, ready_s)
        self._begin_s[stage] = max(free_s, ready_s)
