"""The times of a step's parts: forward as a whole, backward and update of each layer, and an average (alpha + beta x
bytes)."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from isthmus.errors import InternalError
from isthmus.planners.sync import WorkerProfile
from isthmus.sync.averaging import Averager
from isthmus.sync.exchange import message_device
from isthmus.sync.hooks import uncompiled

KEPT_STEPS = 16

Moment = float | torch.Event  # on the device's own clock: the host is far ahead of what it has asked of an accelerator


def now(device: torch.device) -> Moment:
    """This moment of the work that was given to the device."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def between_s(start: Moment, end: Moment) -> float:
    """Seconds between two moments of one device; waits for the second."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float), "moments of different clocks"
    return end - start


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds of one worker's steps. Layers in the order in which they became ready."""

    layers: tuple[str, ...]
    forward_s: float  # from the start of the step's first forward to the end of its last one
    begins_s: tuple[float, ...]  # from the start of the first forward until the layer's own forward begins
    ready_s: tuple[float, ...]  # from then until the layer's gradients were there and it was updated


class _Mark(NamedTuple):
    moment: Moment
    waited_s: float  # waiting for averages in this step so far: it is left out


class _ProfiledStep:
    def __init__(self) -> None:
        self.start: _Mark | None = None
        self.begins: dict[str, _Mark] = {}
        self.forward_end: _Mark | None = None
        self.ready: dict[str, _Mark] = {}


def _between_s(start: _Mark, end: _Mark) -> float:
    return between_s(start.moment, end.moment) - (end.waited_s - start.waited_s)


class Profiler:
    """Notes the moments of the newest steps; they are read only when somebody asks, so CUDA is never waited for."""

    def __init__(self, model: nn.Module, device: torch.device, waited_s: Callable[[], float]) -> None:
        """`waited_s` says how long averages were waited for in this step."""
        self._device = device
        self._waited_s = waited_s
        self._now = _ProfiledStep()
        self._steps: deque[_ProfiledStep] = deque(maxlen=KEPT_STEPS)
        self._handles = [
            model.register_forward_pre_hook(uncompiled(self._forward_begins)),
            model.register_forward_hook(uncompiled(self._forward_ended)),
        ]

    def begins(self, layer: str) -> None:
        """The layer's forward begins; the first of several counts."""
        self._forward_begins()
        self._now.begins.setdefault(layer, self._mark())

    def ready(self, layer: str) -> None:
        self._now.ready[layer] = self._mark()

    def stepped(self) -> None:
        self._steps.append(self._now)
        self._now = _ProfiledStep()

    @property
    def steps(self) -> int:
        """Return how many are kept."""
        return len(self._steps)

    def forget(self) -> None:
        """Leave out what was measured so far."""
        self._steps.clear()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def times(self) -> WorkerTimes:
        """Medians over the steps that are kept. Raises InternalError if there are none."""
        whole = [s for s in self._steps if s.ready]
        if not whole:
            raise InternalError("no step was measured")
        layers = tuple(whole[-1].ready)
        forward_s: list[float] = []
        begins_s: list[list[float]] = []
        ready_s: list[list[float]] = []
        for step in whole:
            first = step.ready[layers[0]]
            end = step.forward_end if step.forward_end is not None else first
            start = step.start if step.start is not None else end
            forward_s.append(_between_s(start, end))
            begins_s.append([_between_s(start, step.begins.get(layer, start)) for layer in layers])
            ready_s.append([_between_s(end, step.ready[layer]) for layer in layers])
        return WorkerTimes(
            layers=layers,
            forward_s=statistics.median(forward_s),
            begins_s=_medians(begins_s),
            ready_s=_medians(ready_s),
        )

    def _mark(self) -> _Mark:
        return _Mark(now(self._device), self._waited_s())

    def _forward_begins(self, *_: object) -> None:
        if self._now.start is None:
            self._now.start = self._mark()

    def _forward_ended(self, *_: object) -> None:
        self._now.forward_end = self._mark()


def _medians(rows: list[list[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def worker_profile(
    worker: str, times: WorkerTimes, units: Sequence[Sequence[str]], average_s: Sequence[float]
) -> WorkerProfile:
    """Return a worker's profile for the planner, in forward order. `average_s` are seconds to average each of `units`
    (backward order).

    A unit is one layer or several that are averaged together: ready when the last of them is. A worker whose layers
    became ready in another order counts as if each had waited for those before it.
    """
    ready_s = dict(zip(times.layers, times.ready_s, strict=True))
    begins_s = dict(zip(times.layers, times.begins_s, strict=True))
    backward_s: list[float] = []
    forward_s: list[float] = []
    through_s = waiting_s = 0.0
    for unit in units:
        unit_s = max(through_s, *(ready_s[layer] for layer in unit))
        # The forward from the unit's first layer on. The model's first unit counts as needed from the start.
        tail_s = max(waiting_s, times.forward_s - min(begins_s[layer] for layer in unit))
        if unit is units[-1]:
            tail_s = times.forward_s
        backward_s.append(unit_s - through_s)
        forward_s.append(tail_s - waiting_s)
        through_s, waiting_s = unit_s, tail_s
    return WorkerProfile(
        worker=worker,
        forward_s=tuple(forward_s[::-1]),
        backward_s=tuple(backward_s[::-1]),
        average_s=tuple(average_s[::-1]),
    )


SMALLEST_BYTES, GROWTH, MOST_BYTES = 1 << 10, 4, 1 << 22
REPEATS = 3
LONGEST_S = 0.3  # after a probe that took this long no larger one follows


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """An average of `size` bytes among all workers takes `latency_s + size x byte_s`."""

    latency_s: float
    byte_s: float  # seconds per byte of the tensor; that 2 (K - 1) / K of it is sent is inside

    def average_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.byte_s


def probe(averager: Averager) -> LinkModel:
    """Measure sums of growing sizes. Every worker must take part, and all get the same answer."""
    device = message_device(averager.group)
    points: list[tuple[int, float]] = []
    size_bytes = SMALLEST_BYTES
    _timed(torch.zeros(1, device=device), averager)  # connections are made by the first one
    while True:
        tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)  # whatever torch's default is
        taken_s = statistics.median(_timed(tensor, averager) for _ in range(REPEATS))
        slowest = torch.tensor([taken_s], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=averager.group)
        points.append((size_bytes, float(slowest)))
        if float(slowest) > LONGEST_S or size_bytes >= MOST_BYTES:
            return fitted(points)
        size_bytes *= GROWTH


def fitted(points: Sequence[tuple[int, float]]) -> LinkModel:
    """Least squares of the relative error, neither term negative. `points`: (bytes, seconds), at least two sizes."""
    sizes, times = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    rows = np.stack([1 / times, sizes / times], axis=1)
    latency_s, byte_s = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0].tolist()
    if latency_s < 0:
        latency_s, byte_s = 0.0, float((rows[:, 1] / (rows[:, 1] @ rows[:, 1])).sum())
    elif byte_s < 0:
        latency_s, byte_s = float((rows[:, 0] / (rows[:, 0] @ rows[:, 0])).sum()), 0.0
    return LinkModel(latency_s=latency_s, byte_s=byte_s)


def _timed(tensor: torch.Tensor, averager: Averager) -> float:
    """Seconds of one sum that all workers start together."""
    dist.barrier(averager.group)
    start_s = time.perf_counter()
    averager.sum([tensor]).wait()
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter() - start_s
