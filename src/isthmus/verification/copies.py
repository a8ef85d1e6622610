"""Replicas on one device each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from isthmus.verification.device_classes import NO_LINK
from isthmus.verification.question import FLOAT32_BYTES
from isthmus.verification.stage_figures import StageFigures

ROUNDING = 1e-9


class Copies:
    """Replicas on one device each, which sum all gradients in one buffer: every device is looked at by itself.

    Each sum waits for messages of part of the gradients to another device and back, by its collective:

        sharded        an R-th part, to each of the others: at least R - 1 devices
        ring           an R-th part, once around, so over one link of each of R devices
        hierarchical   a k-th part to each other region of k that take part, over a link that joins them; the whole to
                       its region's leader and back, but for one device of each region
    """

    def __init__(self, figures: StageFigures) -> None:
        question = figures.reading.question
        self._batch, fleet = question.micro_batches, question.fleet
        holders = question.constraints.data_holders
        lacked = question.constraints.lacked_by
        targets = {op.target for op in figures.reading.operators}
        names = [n for n in holders or fleet.names if not lacked(n) & targets]
        state, saved = float(figures.state[0, -1]), float(figures.saved[0, -1])
        columns, work = float(figures.columns[0, -1]), float(figures.work[0, -1])
        gpipe, self._each_s, self._most, self._names = (
            question.schedule == "gpipe",
            list[float](),
            list[int](),
            list[str](),
        )
        for name in names:
            room, speed = question.room_bytes(name) - state, question.flops_per_s(name)
            again = (room - saved, columns, work + float(figures.forward[0, -1]))
            for left, kept, flops in ((room, saved, work), again) if question.recompute else ((room, saved, work),):
                held = self._batch if left >= 0 and not kept else int(left // kept) if left >= 0 else 0
                if held >= 1:
                    self._each_s.append(flops / speed)
                    self._most.append(held if gpipe else self._batch)
                    self._names.append(name)
                    break
        summed = question.gradients and question.period == 1
        self._elements = float(figures.summed(len(fleet.names))[0, -1]) if summed else 0.0
        links = [[None if a == b else fleet.link(a, b) for b in self._names] for a in self._names]
        self._latency_s = np.array([[x.latency_s if x else NO_LINK for x in row] for row in links])
        self._byte_s = np.array([[1 / x.bandwidth_bytes_per_s if x else NO_LINK for x in row] for row in links])
        self._homes = [fleet.device(name).region for name in self._names]

    def below(self, limit_s: float, replicas: int) -> bool:
        if len(self._names) < replicas:
            return False
        if not self._elements:
            return self._enough([limit_s] * len(self._names), replicas)
        part = FLOAT32_BYTES * (self._elements // replicas)
        there_s = self._latency_s + part * self._byte_s
        around_s = np.sort(there_s + there_s.T, axis=1)[:, replicas - 2]
        if self._enough((limit_s - around_s).tolist(), replicas):
            return True
        if replicas == 2:
            return False
        ring_s = float(np.sort(there_s.min(axis=1))[:replicas].sum())
        return self._enough([limit_s - ring_s] * len(self._names), replicas) or self._by_region(limit_s, replicas)

    def _by_region(self, limit_s: float, replicas: int) -> bool:
        """Regions that are joined by links up to some time, the least at which all that take part are: each device
        waits for it, there and back."""
        homes = np.array([sorted(set(self._homes)).index(home) for home in self._homes])
        apart = homes[:, None] != homes[None, :]
        part = FLOAT32_BYTES * (self._elements // min(replicas, int(homes.max()) + 1))
        across_s = self._latency_s + part * self._byte_s
        across_s = across_s + across_s.T
        whole_s = self._latency_s + FLOAT32_BYTES * self._elements * self._byte_s
        inside_s = np.where(apart, np.inf, whole_s + whole_s.T).min(axis=1)
        island = homes.copy()
        for level_s in np.unique(across_s[apart]).tolist():
            for a, b in np.argwhere((across_s <= level_s) & apart):
                island[island == island[b]] = island[a]
            for number in np.unique(island):
                inside = np.flatnonzero(island == number)
                leading = [self._completed(int(d), limit_s - level_s) for d in inside]
                led = [self._completed(int(d), limit_s - level_s - float(inside_s[d])) for d in inside]
                more = sorted((a - b for a, b in zip(leading, led, strict=True)), reverse=True)
                leaders = len(np.unique(homes[inside]))
                if len(led) >= replicas and sum(sorted(led)[-replicas:]) + sum(more[:leaders]) >= self._batch:
                    return True
        return False

    def _enough(self, seconds: Sequence[float], replicas: int) -> bool:
        """Whether some `replicas` devices complete the batch, each in its own time."""
        ends = sorted(self._completed(device, own_s) for device, own_s in enumerate(seconds))
        return ends[-replicas] > 0 and sum(ends[-replicas:]) >= self._batch

    def _completed(self, device: int, seconds: float) -> int:
        return min(self._most[device], max(0, math.floor(seconds / self._each_s[device] * (1 + ROUNDING))))
