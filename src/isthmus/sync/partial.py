"""PLSGD with equal numbers: in each iteration of a period another run of layers is averaged (DreamDDP, Example 1)."""

from __future__ import annotations

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.planners.sync import SyncProblem, WorkerProfile, plan_sync
from isthmus.plans.sync import SyncPlan
from isthmus.sync.layers import FlatModel
from isthmus.sync.mode import Mode, Setting
from isthmus.sync.scheduled import Scheduled
from isthmus.sync.updates import Closure, average_with_state


class PartialSync(Mode):
    """Averages after the update, in the open. Any optimizer, clipping and scaling work as ever."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plan = equal_plan(setting.model, setting.period)

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        assert self.plan is not None
        due = set(self.plan.averaged(self.steps))
        layers = [layer for layer in reversed(s.model.layers) if layer.name in due]
        if s.options.average_state:
            s.updates.check_to_average(s.model.layers, closure, scaler)
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, layers)
        loss = s.updates.whole(closure, scaler)
        if not s.options.average_state:
            self.average(layers)
        return loss


class OverlappedPartialSync(Scheduled):
    """The same schedule inside backward, as the paper runs it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.follow(equal_plan(setting.model, setting.period))


def partial_sync(setting: Setting) -> Mode:
    """By the option `overlap`."""
    return OverlappedPartialSync(setting) if setting.options.overlap else PartialSync(setting)


def equal_plan(model: FlatModel, period: int) -> SyncPlan:
    """Every layer once in a period, as many in each iteration; nothing is known of times, so no bubbles are filled."""
    count = len(model.layers)
    names = tuple(layer.name for layer in model.layers)
    # Averages far longer than computation leave no bubble to fill.
    profile = WorkerProfile(
        worker="any", forward_s=(0.0,) * count, backward_s=(1e-3,) * count, average_s=(1.0,) * count
    )
    return plan_sync("equal-number", SyncProblem(layers=names, workers=(profile,), iterations=period))
