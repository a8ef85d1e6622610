"""How long this worker's layers take: forward as a whole, then backward and update of each."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from isthmus.errors import InternalError
from isthmus.planners.sync import WorkerProfile
from isthmus.sync.stopwatch import Moment, between_s, now

KEPT_STEPS = 16


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds of one worker's steps. Layers in the order in which they became ready."""

    layers: tuple[str, ...]
    forward_s: float
    """From the start of the step's first forward to the end of its last one."""
    ready_s: tuple[float, ...]
    """From then until the layer's gradients were there and it was updated."""


class _Step:
    def __init__(self) -> None:
        self.start: Moment | None = None
        self.forward_end: Moment | None = None
        self.ready: dict[str, Moment] = {}


class Profiler:
    """Notes the moments of the newest steps; they are read only when somebody asks, so CUDA is never waited for."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._now = _Step()
        self._steps: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self._handles = [
            model.register_forward_pre_hook(self._forward_begins), model.register_forward_hook(self._forward_ended)
        ]  # fmt: skip

    def ready(self, layer: str) -> None:
        self._now.ready[layer] = now(self._device)

    def stepped(self) -> None:
        self._steps.append(self._now)
        self._now = _Step()

    @property
    def steps(self) -> int:
        """How many are kept."""
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
        ready_s: list[list[float]] = []
        for step in whole:
            first = step.ready[layers[0]]
            end = step.forward_end if step.forward_end is not None else first
            forward_s.append(between_s(step.start, end) if step.start is not None else 0.0)
            ready_s.append([between_s(end, step.ready[layer]) for layer in layers])
        return WorkerTimes(
            layers=layers, forward_s=statistics.median(forward_s),
            ready_s=tuple(statistics.median(column) for column in zip(*ready_s, strict=True)),
        )  # fmt: skip

    def _forward_begins(self, *_: object) -> None:
        if self._now.start is None:
            self._now.start = now(self._device)

    def _forward_ended(self, *_: object) -> None:
        self._now.forward_end = now(self._device)


def worker_profile(
    worker: str, times: WorkerTimes, units: Sequence[Sequence[str]], average_s: Sequence[float]
) -> WorkerProfile:  # fmt: skip
    """What the planner wants, in forward order, given how long averaging each of `units` (backward order) takes.

    A unit is one layer or several that are averaged together: ready when the last of them is. A worker whose layers
    became ready in another order counts as if each had waited for those before it.
    """
    ready_s = dict(zip(times.layers, times.ready_s, strict=True))
    backward_s: list[float] = []
    through_s = 0.0
    for unit in units:
        unit_s = max(ready_s[layer] for layer in unit)
        backward_s.append(max(0.0, unit_s - through_s))
        through_s = max(through_s, unit_s)
    forward_s = [0.0] * len(units)
    forward_s[-1] = times.forward_s  # only the sum counts where averages do not reach into the forward
    return WorkerProfile(
        worker=worker, forward_s=tuple(forward_s[::-1]), backward_s=tuple(backward_s[::-1]),
        average_s=tuple(average_s[::-1]),
    )  # fmt: skip
