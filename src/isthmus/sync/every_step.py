"""S-SGD: gradients are averaged in every step, on the way while backward goes on (WFBP, Poseidon 2017, section 3).

backward   |-- layer 4 --|-- layer 3 --|-- layer 2 --|-- layer 1 --|
wire                     |....4....|   |.....3 + 2.....|           |...1...|  buckets, in this order
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.planners.sync import by_size
from isthmus.plans.sync_schedule import SendOrder
from isthmus.sync.averaging import PendingAverage
from isthmus.sync.hooks import gradients
from isthmus.sync.mode import Mode, Setting
from isthmus.sync.packing import PackedTensors, pack
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
        self.buckets: list[list[int]] = []
        """Layers by number that travel together, in the order in which they leave."""
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
