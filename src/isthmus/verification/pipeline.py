"""One replica timed for any number of micro-batches, each stage holding as many as its memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from isthmus.verification.cutting import CutGraph, Part
from isthmus.verification.question import Question
from isthmus.verification.timing import StepTiming
from isthmus.verification.verdict import CLOSE

MOST_SUBSETS = 7
"""Stages short of memory up to which every set of them is tried as the set that recomputes; beyond, the first k."""


class PipelineCheck:
    """A cut graph on devices, with the best choice found of stages that recompute, or with a given one."""

    def __init__(
        self, question: Question, graph: CutGraph, devices: Sequence[str], recompute: tuple[bool, ...] | None = None
    ) -> None:
        self.graph, self.devices = graph, tuple(devices)
        self._question, self._given = question, recompute
        self._plain = (False,) * len(self.devices)
        self._timed: dict[tuple[bool, ...], StepTiming] = {}
        self._alone: dict[int, float] = {}
        self._best: dict[int, float] = {}

    def timed(self, recompute: tuple[bool, ...] | None = None) -> StepTiming:
        chosen = self._plain if recompute is None else recompute
        if chosen not in self._timed:
            self._timed[chosen] = StepTiming(self._question, self.graph, self.devices, chosen)
        return self._timed[chosen]

    def step_s(self, micro_batches: int, below_s: float = float("inf")) -> float:
        """Before what replicas sum; possibly more than it is where it is not below the limit; infinite where nothing
        fits."""
        if micro_batches not in self._alone:
            self._alone[micro_batches] = self._chosen_s(micro_batches, self._given or self._plain)
        found_s = self._alone[micro_batches]
        if self._given is not None or not self._question.recompute:
            return found_s
        if self.timed().unhindered_s(micro_batches) >= min(found_s * (1 - CLOSE), below_s):
            return found_s  # no choice makes it shorter, or short enough
        if micro_batches not in self._best:
            chosen = (self._chosen_s(micro_batches, again) for again in self._choices(micro_batches))
            self._best[micro_batches] = min([found_s, *chosen])
        return self._best[micro_batches]

    def _choices(self, micro_batches: int) -> Iterator[tuple[bool, ...]]:
        """Sets of stages that recompute, of those that hold fewer than all micro-batches otherwise."""
        scarce = [
            stage
            for stage, (device, part) in enumerate(zip(self.devices, self.graph.parts, strict=True))
            if self.devices.count(device) > 1 or self._most(device, part, micro_batches) < micro_batches
        ]
        for count in range(1, len(scarce) + 1):
            few = len(scarce) <= MOST_SUBSETS
            for chosen in itertools.combinations(scarce, count) if few else [scarce[:count]]:
                yield tuple(stage in chosen for stage in range(len(self.devices)))

    def _chosen_s(self, micro_batches: int, recompute: tuple[bool, ...]) -> float:
        limits = self._limits(micro_batches, recompute)
        return float("inf") if limits is None else self.timed(recompute).step_s(limits, micro_batches)

    def _most(self, device: str, part: Part, micro_batches: int) -> int:
        """Micro-batches that the device holds of this stage alone; below 0 where it does not fit at all."""
        room = self._question.room_bytes(device) - part.memory_bytes(0, False)
        each = part.kept_bytes(False)
        return -1 if room < 0 else min(micro_batches, room // each) if each else micro_batches

    def _limits(self, micro_batches: int, recompute: tuple[bool, ...]) -> list[int] | None:
        """As many as fit, the least for all stages first; where stages share a device, the first takes what is left."""
        least = micro_batches if self._question.schedule == "gpipe" else 1
        free = {device: self._question.room_bytes(device) for device in self.devices}
        for device, part, again in zip(self.devices, self.graph.parts, recompute, strict=True):
            free[device] -= part.memory_bytes(least, again)
        if min(free.values()) < 0:
            return None
        found: list[int] = []
        for device, part, again in zip(self.devices, self.graph.parts, recompute, strict=True):
            more, each = micro_batches - least, part.kept_bytes(again)
            if each:
                more = min(more, free[device] // each)
                free[device] -= more * each
            found.append(least + more)
        return found
