"""Local SGD: every worker on its own for a period, then the average of all models (LSGD; DreamDDP Eq. 2)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.sync.balance import balanced_steps
from isthmus.sync.mode import Mode, Setting
from isthmus.sync.monitor import PeriodReport
from isthmus.sync.updates import Closure, average_with_state

BALANCED_OVER = 5
"""Periods whose median says how fast a worker is: one alone may have been disturbed."""


class LocalSteps(Mode):
    """A mode whose workers meet only at the end of a period, after steps of their own number."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._balanced: list[int] = []
        self._compute_s: deque[tuple[float, ...]] = deque(maxlen=BALANCED_OVER)

    def period_ended(self, report: PeriodReport | None) -> None:
        if not self.setting.options.balance or report is None:
            return
        self._compute_s.append(report.compute_s)
        usual_s = [statistics.median(of_worker) for of_worker in zip(*self._compute_s, strict=True)]
        self._balance(balanced_steps(self.setting.period, usual_s))

    def _balance(self, steps: Sequence[int]) -> None:
        self._balanced = list(steps)
        self.own_period = steps[dist.get_rank(self.setting.averager.group)]
        self.setting.averager.count_steps(steps)

    def state(self) -> dict[str, Tensor]:
        return {"balanced": torch.tensor(self._balanced)} if self._balanced else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        if "balanced" in state:
            self._balance(state["balanced"].tolist())


class LocalSGD(LocalSteps):
    """The whole model is averaged after the last step of each period, in the open."""

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        if s.options.average_state:
            s.updates.check_to_average(s.model.layers, closure, scaler)
        with_state = s.options.average_state and self.ends_period
        if with_state:
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, s.model.layers)
        loss = s.updates.whole(closure, scaler)
        if self.ends_period and not with_state:
            self.average(s.model.layers)
        return loss
