"""Local SGD: every worker on its own for a period, then the average of all models (LSGD; DreamDDP Eq. 2)."""

from __future__ import annotations

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.sync.mode import Mode
from isthmus.sync.updates import Closure, average_with_state


class Local(Mode):
    """The whole model is averaged after the last step of each period, in the open."""

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        with_state = s.options.average_state and self.ends_period
        if with_state:
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, s.model.layers)
        loss = s.updates.whole(closure, scaler)
        if self.ends_period and not with_state:
            self.average(s.model.layers)
        return loss
