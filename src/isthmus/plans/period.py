"""Which plan was in force when: a run may change its plan."""

from __future__ import annotations

import msgspec

from isthmus.fleet import Fleet
from isthmus.plans.plan import Plan


class PlanPeriod(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of a run, until the next period begins."""

    plan: Plan
    fleet: Fleet
    """As it was believed to be when the plan was made."""
    first_step: int
    """Steps that were done before."""
    since_s: float = 0.0
    """In seconds of the run's trace."""
