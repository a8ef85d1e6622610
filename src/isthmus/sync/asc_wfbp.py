"""S-SGD in messages that are planned for what was measured, several on their way at once (ASC-WFBP, INFOCOM 2021).

steps 0 .. W-1   as `every-step`, while the moments are noted at which layers are ready
step W           links are probed, worker 0 plans for the slowest worker of each layer, all follow its plan
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from itertools import accumulate

import msgspec
import torch.distributed as dist
from torch import Tensor

from isthmus.errors import UserError
from isthmus.planners.sync import fused
from isthmus.sync.every_step import EveryStep, numbered
from isthmus.sync.exchange import broadcast, gather, to_bytes
from isthmus.sync.link import probe
from isthmus.sync.mode import Setting, restored_document


class _AscWfbpState(msgspec.Struct, frozen=True):
    buckets: list[list[int]] | None


class AscWfbp(EveryStep):
    """Buckets by plan; `Options.at_once` of them share the links. The numbers are S-SGD's, whatever the plan."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._planned = False
        self._begun_s = 0.0
        self._ready_s: list[list[float]] = [[] for _ in setting.model.layers]
        """Of each layer in each step, since the first layer was ready."""

    def ready(self, number: int) -> None:
        if not self._planned:
            now_s = time.perf_counter()
            if not self._order.complete:
                self._begun_s = now_s
            self._ready_s[number].append(now_s - self._begun_s)
        super().ready(number)

    def stepped(self) -> None:
        if self.steps == 1:
            for times in self._ready_s:
                times.clear()  # allocations and first calls
        if not self._planned and self.steps >= self.setting.options.warm_up_steps:
            self._plan()

    def _plan(self) -> None:
        s = self.setting
        group = s.averager.group
        link = probe(s.averager)
        own = [statistics.median(times) for times in reversed(self._ready_s)]
        slowest = [max(times) for times in zip(*gather(own, list[float], group), strict=True)]
        made: list[list[int]] | None = None
        if dist.get_rank(group) == 0:
            wire_s = [layer.size_bytes * link.byte_s for layer in reversed(s.model.layers)]
            found = fused(list(accumulate(slowest, max)), wire_s, link.latency_s, s.options.at_once)
            made = numbered(found.messages, len(s.model.layers))
        self.send_in(broadcast(made, list[list[int]], group))
        self._planned = True
        s.monitor.restart()

    def state(self) -> dict[str, Tensor]:
        return {"asc-wfbp": to_bytes(_AscWfbpState(self.buckets if self._planned else None))}

    def load(self, state: Mapping[str, Tensor]) -> None:
        buckets = restored_document(state, "asc-wfbp", _AscWfbpState).buckets
        if buckets is None:
            return
        held = sorted(number for bucket in buckets for number in bucket)
        if held != list(range(len(self.setting.model.layers))):
            raise UserError("saved sync state: 'asc-wfbp': holds other layers than the model's. Is it the same model?")
        self.send_in(buckets)
        self._planned = True
