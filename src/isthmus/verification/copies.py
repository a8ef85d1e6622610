"""Replicas on one device each."""

from __future__ import annotations

import numpy as np

from isthmus.verification.device_classes import NO_LINK, best_link
from isthmus.verification.question import FLOAT32_BYTES
from isthmus.verification.stage_figures import Floats, StageFigures

ROUNDING = 1e-9
MOST_LEVELS = 40  # times of links between regions that are distinguished


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
        gpipe, again_flops = question.schedule == "gpipe", work + float(figures.forward[0, -1])
        ways, self._names = list[list[tuple[float, int]]](), list[str]()
        for name in names:
            room, speed = question.room_bytes(name) - state, question.flops_per_s(name)
            modes = list[tuple[float, int]]()
            for left, kept, flops in ((room, saved, work), (room - saved, columns, again_flops)):
                held = self._batch if left >= 0 and not kept else int(left // kept) if left >= 0 else 0
                modes.append((flops / speed, 0 if held < 1 else held if gpipe else self._batch))
            if any(most for _, most in modes[: 1 + question.recompute]):
                ways.append(modes[: 1 + question.recompute])
                self._names.append(name)
        # [device, way]: as it is, and with recomputing, which takes longer and may hold more.
        self._ways = np.array(ways, dtype=np.float64).reshape(len(ways), 1 + question.recompute, 2)
        summed = question.gradients and question.period == 1
        self._elements = float(figures.summed(len(fleet.names))[0, -1]) if summed else 0.0
        none = (NO_LINK, NO_LINK)
        links = [[none if a == b else best_link(fleet, a, b) for b in self._names] for a in self._names]
        self._latency_s, self._byte_s = np.array(links).reshape(len(links), len(links), 2).transpose(2, 0, 1)
        homes = [fleet.device(name).region for name in self._names]
        self._regions = np.array([sorted(set(homes)).index(home) for home in homes])

    def below(self, limit_s: float, fewest: int, replicas: int) -> bool:
        """Whether so many, from fewest to `replicas`, may take less."""
        if len(self._names) < fewest:
            return False
        replicas = min(replicas, len(self._names))
        if not self._elements:
            return self._enough(limit_s, replicas)
        part = FLOAT32_BYTES * (self._elements // replicas)
        there_s = self._latency_s + part * self._byte_s
        around_s = np.sort(there_s + there_s.T, axis=1)[:, fewest - 2]
        if self._enough(limit_s - around_s, replicas):
            return True
        if replicas == 2:
            return False
        ring_s = float(np.sort(there_s.min(axis=1))[:fewest].sum())
        if self._enough(limit_s - ring_s, replicas):
            return True
        return self._by_region(limit_s, fewest, replicas)

    def _by_region(self, limit_s: float, fewest: int, replicas: int) -> bool:
        """Regions that are joined by links up to some time, the least at which all that take part are: each device
        waits for it, there and back."""
        homes, regions = self._regions, int(self._regions.max()) + 1
        part = FLOAT32_BYTES * (self._elements // min(replicas, regions))
        across_s = self._latency_s + part * self._byte_s
        apart_s = np.full((regions, regions), np.inf)
        np.minimum.at(apart_s, (homes[:, None], homes[None, :]), across_s + across_s.T)
        np.fill_diagonal(apart_s, np.inf)
        whole_s = self._latency_s + FLOAT32_BYTES * self._elements * self._byte_s
        inside_s = np.where(homes[:, None] != homes[None, :], np.inf, whole_s + whole_s.T).min(axis=1)
        island, before_s = np.arange(regions), 0.0
        levels = np.unique(apart_s[np.isfinite(apart_s)])
        step = max(1, len(levels) // MOST_LEVELS)
        for number in range(0, len(levels), step):
            # Regions that are joined by no more, and not by less than the first level of these: that is the time.
            level_s, longest_s = float(levels[number]), float(levels[min(number + step, len(levels)) - 1])
            for a, b in np.argwhere((apart_s > before_s) & (apart_s <= longest_s)):
                island[island == island[b]] = island[a]
            before_s = longest_s
            leading, led = self._completed(limit_s - level_s), self._completed(limit_s - level_s - inside_s)
            for one in np.unique(island):
                inside = island[homes] == one
                some, more = np.sort(led[inside]), np.sort((leading - led)[inside])
                leaders = int((island == one).sum())
                if len(some) >= fewest and some[-replicas:].sum() + more[-leaders:].sum() >= self._batch:
                    return True
        return False

    def _enough(self, seconds: Floats | float, replicas: int) -> bool:
        """Whether some `replicas` devices complete the batch, each in its own time."""
        return bool(np.sort(self._completed(seconds))[-replicas:].sum() >= self._batch)

    def _completed(self, seconds: Floats | float) -> Floats:
        """[device]"""
        time_s = np.broadcast_to(np.maximum(seconds, 0.0), len(self._names))[:, None]
        of_ways = np.minimum(self._ways[:, :, 1], np.floor(time_s / self._ways[:, :, 0] * (1 + ROUNDING)))
        return of_ways.max(axis=1)
