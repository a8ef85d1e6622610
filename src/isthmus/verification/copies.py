"""Replicas on one device each."""

from __future__ import annotations

import math

import numpy as np

from isthmus.verification.device_classes import NO_LINK
from isthmus.verification.question import FLOAT32_BYTES
from isthmus.verification.stage_figures import StageFigures

ROUNDING = 1e-9


class Copies:
    """Replicas on one device each, which sum all gradients in one buffer: every device is looked at by itself.

    Each waits for two messages of an R-th part at least, over its own best link. Where their sites are not joined by
    links quicker than some, each waits for two messages over one that is no quicker than these, as the sum of each
    site, or of each member, crosses it and comes back.
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
        part = FLOAT32_BYTES * (self._elements // replicas)
        apart_s = 2 * (self._latency_s + part * self._byte_s) * (self._elements > 0)
        apart_s = np.minimum(apart_s, apart_s.T)
        own_s = np.where(np.eye(len(apart_s), dtype=bool), np.inf, apart_s).min(axis=1)
        homes = np.array([sorted(set(self._homes)).index(home) for home in self._homes])
        island = homes.copy()
        levels = np.unique(apart_s[homes[:, None] != homes[None, :]])
        for across_s in [0.0, *levels.tolist()]:
            for a, b in np.argwhere((apart_s <= across_s) & (homes[:, None] != homes[None, :])) if across_s else ():
                island[island == island[b]] = island[a]
            for number in np.unique(island):
                inside = np.flatnonzero(island == number)
                ends = [self._completed(int(d), limit_s - max(float(own_s[d]), across_s)) for d in inside]
                if len(ends) >= replicas and sum(sorted(ends)[-replicas:]) >= self._batch:
                    return True
        return False

    def _completed(self, device: int, seconds: float) -> int:
        return min(self._most[device], max(0, math.floor(seconds / self._each_s[device] * (1 + ROUNDING))))
