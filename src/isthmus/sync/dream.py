"""DreamDDP: scheduled partial synchronisation, planned for what was measured (sections 3.3 and 3.4).

steps 0 .. W-1   updates in backward, nothing averaged but the whole model at a period's end; layers are timed
step W           links are probed, worker 0 plans over all workers' times, all follow its plan
each period      link time is compared with that of the plan's first periods; another 20 % away, plan again
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import torch.distributed as dist
from torch import Tensor

from isthmus.errors import UserError
from isthmus.planners.sync import SyncProblem, plan_sync
from isthmus.plans.sync import SyncPlan
from isthmus.sync.exchange import broadcast, gather, to_bytes
from isthmus.sync.mode import PeriodReport, Setting, restored_document
from isthmus.sync.profile import LinkModel, Profiler, WorkerTimes, probe, worker_profile
from isthmus.sync.scheduled import JOINED, Scheduled, layers_of

LOG = logging.getLogger("isthmus.sync")
_WATCHED_PERIODS = 3  # a link's time is the median of so many periods': one disturbed period is no drift
_NOTICEABLE = 0.01
"""A change below this share of the computation is not worth a plan, however large a share it is of an average that
takes next to nothing."""

_AS_GOOD = 1.003
"""A plan is followed that takes no more than this and has the fewest messages: each costs processor time, which no plan
counts."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the options that are not given."""

    planner: str
    spare: float
    drift: float
    least_latencies: tuple[float, ...]
    """Layers are joined until their bytes take so many latencies: each of these is planned for."""


OURS = Method(planner="dream-spread", spare=1.0, drift=0.2, least_latencies=(4.0, 2.0, 1.0, 0.5, 0.0))
PAPER = Method(planner="dream-dfs", spare=0.0, drift=math.inf, least_latencies=(0.0,))
"""Algorithm 2 on single layers, with the fillings of Eq. 12, for times that are profiled once."""


class _DreamState(msgspec.Struct, frozen=True, kw_only=True):
    plan: SyncPlan | None
    origin: int
    busy_s: float | None


class Dream(Scheduled):
    """Plans, and follows the plan."""

    def __init__(self, setting: Setting, method: Method) -> None:
        super().__init__(setting)
        given = setting.options
        self._method = msgspec.structs.replace(
            method,
            planner=method.planner if given.planner is None else given.planner,
            spare=method.spare if given.spare is None else given.spare,
            drift=method.drift if given.drift is None else given.drift,
        )
        self.link: LinkModel | None = None  # the link as the newest probe measured it
        self.plans = 0  # how many were made
        self._profiler = Profiler(setting.module, setting.model.buffers[0].device, lambda: setting.monitor.waited_s)
        self._busy_s: float | None = None  # seconds of a period that averages took when the plan was new
        self._newest_s: deque[float] = deque(maxlen=_WATCHED_PERIODS)
        """Seconds that averages took in the newest periods."""
        if setting.options.plan is not None:
            self.follow(_checked(setting.options.plan, setting))

    def ready(self, number: int) -> None:
        super().ready(number)
        self._profiler.ready(self.setting.model.layers[number].name)

    def entered(self, number: int) -> None:
        super().entered(number)
        self._profiler.begins(self.setting.model.layers[number].name)

    @property
    def averages_whole(self) -> bool:
        return self.ends_period or self.steps + 1 >= self.setting.options.warm_up_steps

    def stepped(self) -> None:
        self._profiler.stepped()
        if self.steps == 1:
            self._profiler.forget()  # allocations and first calls
        if self.plan is None and self.steps >= self.setting.options.warm_up_steps:
            self._make_plan()
        super().stepped()

    def period_ended(self, report: PeriodReport | None) -> None:
        s = self.setting
        # A period told of here began and ended under this plan only if it is a whole period younger.
        if s.options.plan is not None or self.plan is None or report is None or report.steps - s.period < self.origin:
            return
        self._newest_s.append(report.link_busy_s)
        if len(self._newest_s) < _WATCHED_PERIODS:
            return
        busy_s = statistics.median(self._newest_s)
        if self._busy_s is None:
            self._busy_s = busy_s
        change_s = abs(busy_s - self._busy_s)
        if change_s > max(self._method.drift * self._busy_s, _NOTICEABLE * s.period * max(report.compute_s)):
            if dist.get_rank(s.averager.group) == 0:
                LOG.info(
                    "averages take %.0f ms of a period, %.0f when the plan was made: planning again",
                    1e3 * busy_s,
                    1e3 * self._busy_s,
                )
            self._make_plan()

    def times(self) -> WorkerTimes | None:
        """Return the times of this worker's newest steps; None before the first."""
        return self._profiler.times() if self._profiler.steps else None

    def _make_plan(self) -> None:
        s = self.setting
        group = s.averager.group
        self.wait()
        self.link = probe(s.averager)
        times = gather(self._profiler.times(), WorkerTimes, group)
        made = self._planned(times, self.link) if dist.get_rank(group) == 0 else None
        self.follow(broadcast(made, SyncPlan, group))
        self.plans += 1
        self._busy_s = None
        self._newest_s.clear()
        s.monitor.restart()

    def _planned(self, times: list[WorkerTimes], link: LinkModel) -> SyncPlan:
        s = self.setting
        copies = 2 + len(s.updates.state_of(s.model.layers[0].parameters[0])) if s.options.average_state else 1
        size_bytes = {layer.name: copies * layer.size_bytes for layer in s.model.layers}
        plans: list[SyncPlan] = []
        found = [tuple(joined(times[0].layers, size_bytes, link, least)) for least in self._method.least_latencies]
        for units in dict.fromkeys(found):
            average_s = [link.average_s(sum(size_bytes[layer] for layer in unit)) for unit in units]
            workers = tuple(
                worker_profile(name, of, units, average_s) for name, of in zip(s.monitor.workers, times, strict=True)
            )
            problem = SyncProblem(
                layers=tuple(JOINED.join(unit) for unit in reversed(units)),
                workers=workers,
                iterations=s.period,
                forward_overlap=self.overlaps_forward,
                spare=self._method.spare,
            )
            plans.append(plan_sync(self._method.planner, problem))
        least_s = min(plan.period_s for plan in plans)
        return next(plan for plan in plans if plan.period_s <= _AS_GOOD * least_s)

    def state(self) -> dict[str, Tensor]:
        saved = _DreamState(plan=self.plan, origin=self.origin, busy_s=self._busy_s)
        return {"dream": to_bytes(saved)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        saved = restored_document(state, "dream", _DreamState)
        self._busy_s = saved.busy_s
        if saved.plan is not None:
            self.follow(_checked(saved.plan, self.setting))
            self.origin = saved.origin
        super().load(state)

    def detach(self) -> None:
        self._profiler.detach()
        super().detach()


def joined(
    layers: Sequence[str], size_bytes: Mapping[str, int], link: LinkModel, least_latencies: float
) -> list[tuple[str, ...]]:
    """Layers in the order given, in runs whose bytes take at least so many latencies of a message; the last may be
    shorter: nothing is left to hide it behind, so it should not be long."""
    found: list[tuple[str, ...]] = []
    run: tuple[str, ...] = ()
    for layer in layers:
        run = (*run, layer)
        if sum(size_bytes[member] for member in run) * link.byte_s >= least_latencies * link.latency_s:
            found.append(run)
            run = ()
    return [*found, run] if run else found


def _checked(plan: SyncPlan, setting: Setting) -> SyncPlan:
    names = {layer.name for layer in setting.model.layers}
    wrong = sorted(names ^ {layer for name in plan.layers for layer in layers_of(name)})
    if wrong:
        raise UserError(f"sync plan: layer {wrong[0]!r} is in only one of the plan and the model: same model?")
    if len(plan.iterations) != setting.period:
        raise UserError(f"sync plan: got a period of {len(plan.iterations)}, expected {setting.period}")
    return plan
