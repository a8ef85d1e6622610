"""The sync plan: which layers are averaged in which iteration of a period (DreamDDP's partial synchronisation)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from isthmus.plans.plan import Certificate

_PLANNED = ("dream", "dreamddp")
_OUTER = ("outer", "streaming")
MODES_OF: Mapping[str, tuple[str, ...]] = {  # the modes that read an option; all read those that are not here
    "balance": ("local", "outer"),
    "average_state": ("local", "outer", "partial", *_PLANNED),
    "bucket_bytes": ("every-step", "asc-wfbp"),
    "overlap": ("partial",),
    "forward_overlap": ("partial", *_PLANNED),
    "spare": _PLANNED,
    "warm_up_steps": ("asc-wfbp", *_PLANNED),
    "drift": _PLANNED,
    "planner": _PLANNED,
    "at_once": ("asc-wfbp",),
    "plan": _PLANNED,
    "outer_rate": _OUTER,
    "outer_momentum": _OUTER,
    "error_decay": _OUTER,
    "fragments": ("streaming",),
    "delay": ("streaming",),
    "mixing": ("streaming",),
    **dict.fromkeys(("decoupled", "steps", "timeout_s", "record"), ("decoupled",)),
}


class SyncIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of the period. Layers stand in backward order, which is the order in which they become ready."""

    scheduled: tuple[str, ...]  # averaged here and, but for fillings, in no other iteration
    filled: tuple[str, ...]  # averaged here too, because the channel had time left that costs nothing
    iteration_s: float
    exposed_s: float  # the part of `iteration_s` in which a worker waits for averaging


class SyncWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule of one worker."""

    worker: str
    alone_s: float  # the period if every worker were like this one
    waits_s: float  # seconds of a period that it spends waiting for slower workers or links


class SyncPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Layer-wise averaging over one period of iterations, after which the period starts again.

    Every layer is scheduled in exactly one iteration of the period.
    """

    planner: str
    layers: tuple[str, ...]  # in forward order
    forward_overlap: bool
    """Averaging may go on during the next forward; each layer's forward waits for its own average only."""
    iterations: tuple[SyncIteration, ...]
    period_s: float
    workers: tuple[SyncWorker, ...]
    slowest: str  # the worker with the longest period alone
    certificate: Certificate
    """The certificate of `period_s`, over any assignment of the layers to the iterations, in intervals or not."""

    @property
    def step_s(self) -> float:
        """Mean seconds per iteration."""
        return self.period_s / len(self.iterations)

    @property
    def exposed_s(self) -> float:
        """Seconds per period in which a worker waits for averaging."""
        return sum(iteration.exposed_s for iteration in self.iterations)

    def averaged(self, step: int) -> tuple[str, ...]:
        """Layers to average after the backward of training step `step`, counted from 0; in backward order."""
        iteration = self.iterations[step % len(self.iterations)]
        due = {*iteration.scheduled, *iteration.filled}
        return tuple(name for name in reversed(self.layers) if name in due)
