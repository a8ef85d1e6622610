"""The problem of a sync planner: these layers, on these workers, each averaged once in so many iterations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.errors import UserError
from isthmus.plans.sync import SyncPlan

TIMES = ("forward_s", "backward_s", "average_s")


@dataclass(frozen=True, kw_only=True)
class WorkerProfile:
    """Seconds that one worker needs per layer, in forward order (DreamDDP, section 3.3: t_FP, t_BP, t_COMM).

    Raises UserError for a time that is negative or not finite.
    """

    worker: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # the layer's backward and its update: averaging starts after both
    average_s: tuple[float, ...]
    """How long averaging the layer occupies this worker's links; 0 for a layer without parameters."""

    def __post_init__(self) -> None:
        for field in TIMES:
            times: tuple[float, ...] = getattr(self, field)
            for number, time_s in enumerate(times):
                if not (math.isfinite(time_s) and time_s >= 0):
                    where = f"worker {self.worker!r}: {field}[{number}]"
                    raise UserError(f"{where}: got {time_s}, expected a finite number of seconds, at least 0")


@dataclass(frozen=True, kw_only=True)
class SyncProblem:
    """One problem: average every layer once per period of `iterations`, in as little time as can be.

    Raises UserError for no layers or workers, names used twice, profiles of another length, a period below one
    iteration, or a worker that computes nothing.
    """

    layers: tuple[str, ...]  # names in forward order
    workers: tuple[WorkerProfile, ...]
    iterations: int  # h of the paper
    forward_overlap: bool = False
    """Whether averaging may go on during the next forward, each layer's forward waiting for its own average.

    The paper calls overlap with the forward infeasible, because averages in place would change parameters in use.
    Gated layer by layer none is in use.
    """
    spare: float = 0.0
    """Share of an iteration's computation that fillings leave free, for what was not foreseen: 0 to 1."""

    def __post_init__(self) -> None:
        for field, names in (("layers", self.layers), ("workers", tuple(w.worker for w in self.workers))):
            if not names:
                raise UserError(f"{field}: got none, expected at least one")
            twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
            if twice is not None:
                raise UserError(f"{field}: got {twice!r} twice, expected different names")
        if self.iterations < 1:
            raise UserError(f"iterations: got {self.iterations}, expected at least 1")
        if not 0 <= self.spare <= 1:
            raise UserError(f"spare: got {self.spare}, expected 0 to 1")
        for profile in self.workers:
            for field in TIMES:
                got, expected = len(getattr(profile, field)), len(self.layers)
                if got != expected:
                    raise UserError(
                        f"worker {profile.worker!r}: {field}: got {got} times, expected {expected}, one a layer"
                    )
            if not sum(profile.backward_s) > 0:
                raise UserError(f"worker {profile.worker!r}: backward_s: got a sum of 0, expected time above 0")


SyncPlanner = Callable[[SyncProblem], SyncPlan]
