"""Reports of a search while it goes on, and its early end with the best plan so far.

A planner is a function from a problem to a plan, its own or a third party's, and its loops lie deep. So who watches is
held by a context variable, not passed along: loops say `looked_at`, which raises `SearchStopped` once the observer
wants the search to end, and a search that has built a whole plan says `keep`. Where something better is known that is
no plan yet, `salvaged` builds it on the way out. Nobody watches by default, and then nothing of this does anything: a
search that is not stopped makes the same plan with an observer and without. There is no clock here, and no signal.

A search that is ended early keeps its plan. What is proven afterwards is what needs no search.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from isthmus.cost import PlanLayout, Problem, build_replicas, layouts_of, preference
from isthmus.errors import IsthmusError, UserError
from isthmus.plans import CompressionConfig, Plan


class SearchStopped(IsthmusError):
    """Planning was to end before it had found a plan."""

    exit_code = 130


class SearchObserver(Protocol):
    """Receives the progress of a search, and may end the search."""

    def planning(self, name: str) -> None:
        """A planner begins on a problem."""

    def part(self, words: str) -> None:
        """The search turns to this part now."""

    def looked_at(self, candidates: int) -> None:
        """So many more orders, cuts, groupings or plans."""

    def found(self, step_s: float) -> None:
        """The best plan so far takes that."""

    def stopped(self) -> bool:
        """Return whether the search is to end."""
        ...


@dataclass
class _Watched:
    observer: SearchObserver
    cut_short: bool = False
    kept: BestPlan | None = None


@dataclass
class BestPlan:
    """The best plan of one problem so far, of all that its planner built."""

    problem: Problem
    _best: dict[CompressionConfig | None, tuple[tuple[float, float], Sequence[PlanLayout]]] = field(
        default_factory=dict
    )
    """The best by compression of messages: times compare only where messages are compressed alike."""

    def take(self, plan: Plan) -> float | None:
        """Its step in seconds, if it is the best so far. Of other sizes, as parts of a search make them, it is not."""
        problem, packing = self.problem, plan.constraints.compression
        count = sum(replica.micro_batches for replica in plan.replicas)
        if (count, plan.micro_batch_size) != (problem.micro_batches, problem.micro_batch_size):
            return None
        judged = preference(problem, plan)
        if packing in self._best and self._best[packing][0] <= judged:
            return None
        self._best[packing] = judged, layouts_of(plan)
        return plan.predicted.step_s if packing == problem.constraints.compression else None

    def plan(self, planner: str) -> Plan | None:
        """The best, built anew for the whole problem: it may come from a part of the fleet, or of other terms."""
        reason = "no plan that was found till then is better with it"
        plans: list[Plan] = []
        for packing, (_, layouts) in self._best.items():
            alike = packing == self.problem.constraints.compression
            again = layouts if alike else [layout._replace(recompute=None) for layout in layouts]
            used = {name for layout in layouts for name in layout.order}
            notes = {name: reason for name in self.problem.fleet.names if name not in used}
            with contextlib.suppress(UserError):  # as it is packed it may not fit
                plans.append(build_replicas(self.problem, again, planner=planner, notes=notes))
        return min(plans, key=lambda plan: preference(self.problem, plan), default=None)


_now: ContextVar[_Watched | None] = ContextVar("watched", default=None)


@contextlib.contextmanager
def observed_by(observer: SearchObserver) -> Generator[None]:
    """All planning inside tells this observer."""
    token = _now.set(_Watched(observer))
    try:
        yield
    finally:
        _now.reset(token)


@contextlib.contextmanager
def keeping(problem: Problem, planner: str) -> Generator[BestPlan]:
    """The plans that a planner finds for the problem inside are kept, if anybody watches."""
    kept, watched = BestPlan(problem), _now.get()
    if watched is None:
        yield kept
        return
    watched.kept = kept
    watched.observer.planning(f"{planner}, {problem.micro_batches} micro-batches")
    try:
        yield kept
    finally:
        watched.kept = None


def part(words: str) -> None:
    """Report the part that the planner turns to now, in a few words."""
    watched = _now.get()
    if watched is not None:
        watched.observer.part(words)


def stopped(candidates: int = 1) -> bool:
    """Report candidates that were looked at. Returns whether a search that may end anywhere is to end."""
    watched = _now.get()
    if watched is None:
        return False
    watched.observer.looked_at(candidates)
    watched.cut_short |= watched.observer.stopped()
    return watched.cut_short


def looked_at(candidates: int = 1) -> None:
    """Do the same as `stopped`, but raises SearchStopped if the search is to end."""
    if stopped(candidates):
        raise SearchStopped("planning was interrupted before it had found a plan")


def keep(plan: Plan) -> Plan:
    """The plan of the problem, or of a part of its fleet. SearchStopped where the search is to end."""
    watched = _now.get()
    if watched is not None and watched.kept is not None:
        best_s = watched.kept.take(plan)
        if best_s is not None:
            watched.observer.found(best_s)
        looked_at(0)
    return plan


@contextlib.contextmanager
def salvaged(best: Callable[[], Plan | None]) -> Generator[None]:
    """Where the search is ended inside, the plan that it had nearly built is kept."""
    try:
        yield
    except SearchStopped:
        with contextlib.suppress(UserError):  # a search that is coarse may have overlooked that it does not fit
            if (plan := best()) is not None:
                keep(plan)
        raise


def cut_short() -> bool:
    """True if an observed search was ended early."""
    watched = _now.get()
    return watched is not None and watched.cut_short
