"""S-SGD: gradients are averaged in every step, on the way while backward goes on (WFBP, Poseidon 2017, section 3), or
in messages that are planned for what was measured (ASC-WFBP, INFOCOM 2021).

backward   |-- layer 4 --|-- layer 3 --|-- layer 2 --|-- layer 1 --|
wire                     |....4....|   |.....3 + 2.....|           |...1...|  buckets, in this order

ASC-WFBP plans once:

steps 0 .. W-1   as `every-step`, while the moments are noted at which layers are ready
step W           links are probed, worker 0 plans for the slowest worker of each layer, all follow its plan
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.planners.sync import by_size, fused
from isthmus.plans.exchanges import SendOrder
from isthmus.sync.averaging import PendingAverage
from isthmus.sync.exchange import broadcast, gather, to_bytes
from isthmus.sync.hooks import gradients
from isthmus.sync.layers import PackedTensors, pack
from isthmus.sync.mode import Mode, Setting, restored_document
from isthmus.sync.profile import probe
from isthmus.sync.updates import Closure


class EveryStep(Mode):
    """Averaged gradients are in place when backward returns: clipping, scaling and any optimizer work as ever."""

    in_backward = True
    resets_each_backward = True

    def __init__(self, setting: Setting, *, in_one: bool = False) -> None:
        """`in_one`: all gradients travel in one message when all are there, which hides nothing (DreamDDP, Eq. 3)."""
        super().__init__(setting)
        sizes_bytes = [layer.size_bytes for layer in reversed(setting.model.layers)]
        messages = by_size(sizes_bytes, sum(sizes_bytes) if in_one else setting.options.bucket_bytes)
        self.buckets: list[list[int]] = []  # layers by number that travel together, in the order in which they leave
        self.send_in(numbered(messages, len(sizes_bytes)))
        self._sent: list[tuple[list[nn.Parameter], PackedTensors, PendingAverage]] = []
        self._averaged = False

    def send_in(self, buckets: list[list[int]]) -> None:
        """From the next backward on. All workers must do so at the same step."""
        self.buckets = buckets
        self._order = SendOrder(buckets)

    def ready(self, number: int) -> None:
        for message in self._order.ready(number):
            self._send(self.buckets[message])

    def _send(self, bucket: Sequence[int]) -> None:
        layers = [self.setting.model.layers[n] for n in bucket]
        packed = pack([grad for layer in layers for grad in gradients(layer)])
        parameters = [p for layer in layers for p in layer.parameters]
        lane = len(self._sent) % self.setting.averager.lanes
        self._sent.append((parameters, packed, self.setting.averager.start(packed.flats, lane)))

    def backward_ended(self) -> None:
        for parameters, packed, pending in self._sent:
            with self.setting.monitor.waiting():
                pending.wait()
            for parameter, average in zip(parameters, packed.views, strict=True):
                parameter.grad = average
        self._sent.clear()
        self._order = SendOrder(self.buckets)
        self._averaged = True

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        if closure is not None:
            return self.setting.updates.whole(self._with_mean_loss(closure), scaler)
        if not self._averaged:
            raise UserError("sync.step(): nothing was averaged since the last one: expected loss.backward() first")
        self._averaged = False
        return self.setting.updates.whole(scaler=scaler)

    def _with_mean_loss(self, closure: Closure) -> Closure:
        """A line search decides by the loss, and all workers must decide alike."""

        def averaged() -> Tensor:
            loss = torch.as_tensor(closure()).detach().clone().reshape(1)  # torch's optimizers take a float as well
            with torch.no_grad(), self.setting.monitor.waiting():
                self.setting.averager.average([loss])
            return loss.reshape(())

        return averaged


def numbered(messages: Sequence[range], layers: int) -> list[list[int]]:
    """Layers by their number in the model, given messages of numbers in backward order."""
    return [[layers - 1 - place for place in message] for message in messages]


class _AscWfbpState(msgspec.Struct, frozen=True):
    buckets: list[list[int]] | None


class AscWfbp(EveryStep):
    """Buckets by plan; `Options.at_once` of them share the links. The numbers are S-SGD's, whatever the plan."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._planned = False
        self._begun_s = 0.0
        self._ready_s: list[list[float]] = [[] for _ in setting.model.layers]
        """Seconds at which each layer was ready in each step, since the first layer was."""

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
