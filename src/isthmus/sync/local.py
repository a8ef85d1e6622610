"""Every worker on its own for a period, then all meet: local SGD (LSGD; DreamDDP Eq. 2) and DiLoCo (Algorithm 1).

Workers of different speed may make different numbers of steps in a period (DreamDDP, 2.3: H_k).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.plans import OuterOptimizer
from isthmus.sync.mode import Mode, OuterExchange, PeriodReport, Setting
from isthmus.sync.updates import Closure, average_with_state

BALANCED_OVER = 5  # periods whose median says how fast a worker is: one alone may have been disturbed


def balanced_steps(period: int, compute_s: Sequence[float]) -> tuple[int, ...]:
    """Steps of each worker, given what one step takes it: about as many together as `period` each, none below 1.

    The sum over the workers of H_k is K H to rounding, so that a period sees the same number of samples.
    """
    speeds = [1 / max(taken_s, 1e-9) for taken_s in compute_s]
    share = period * len(speeds) / sum(speeds)
    return tuple(max(1, round(share * speed)) for speed in speeds)


class LocalSteps(Mode):
    """A mode whose workers meet only at the end of a period, after steps of their own number."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._balanced: list[int] = []
        self._compute_s: deque[tuple[float, ...]] = deque(maxlen=BALANCED_OVER)

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        if s.options.average_state:
            s.updates.check_to_average(s.model.layers, closure, scaler)
        averaged = s.options.average_state and self.ends_period
        if averaged:
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, s.model.layers)
        loss = s.updates.whole(closure, scaler)
        if self.ends_period:
            self.meet(averaged=averaged)
        return loss

    def meet(self, *, averaged: bool) -> None:
        """The last step of a period is made. `averaged`: the workers' parameters are equal already."""
        raise NotImplementedError

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

    def meet(self, *, averaged: bool) -> None:
        if not averaged:
            self.average(self.setting.model.layers)


class DiLoCo(LocalSteps):
    """After the last step of each period comes an outer step, on one flat tensor per dtype and device."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        outer = OuterOptimizer(rate=setting.options.outer_rate, momentum=setting.options.outer_momentum)
        self._exchange = OuterExchange([buffer.clone() for buffer in setting.model.buffers], setting, outer)

    def meet(self, *, averaged: bool) -> None:
        own = self.setting.model.buffers
        self._exchange.start(own, averaged=averaged)
        self._exchange.step()
        self._exchange.mix_into(own)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **self._exchange.state("outer")}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self._exchange.load(state, "outer")
