"""What a run of `isthmus.sync` has done so far."""

from __future__ import annotations

import msgspec

from isthmus.plans.sync import SyncPlan
from isthmus.sync.link import LinkModel
from isthmus.sync.monitor import PeriodReport
from isthmus.sync.profile import WorkerTimes


class SyncStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A view of one worker, in seconds and bytes."""

    mode: str
    steps: int
    sent_bytes: int
    """By this worker, for averages: 2 (K - 1) / K of what was averaged, as in a ring."""
    workers: tuple[str, ...]
    last_period: PeriodReport | None
    """The newest that all workers have reported: one period late."""
    slowest: str | None
    """The worker that the others wait for, and what it costs them per step; None until a period was notified of."""
    behind_s: float
    plan: SyncPlan | None
    plans: int
    """How many were made, `dream` only."""
    link: LinkModel | None
    """As `dream` has measured it."""
    times: WorkerTimes | None
    """This worker's newest steps, as `dream` has measured them."""
    layer_bytes: dict[str, int]
    """The layers that averages are made of, in the order of registration."""
