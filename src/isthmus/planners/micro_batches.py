"""Into how many micro-batches a batch is cut: more fill the pipeline sooner, fewer send latency less often.

The cost model knows no overhead of a small tasklet, so it is the caller who says which counts may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from isthmus.cost import Problem, preference
from isthmus.errors import FleetTooSmall, UserError
from isthmus.plan import Plan
from isthmus.planners.bounds import step_certificate
from isthmus.planners.price_bound import price_certificate


def over_counts(
    problem: Problem, counts: Sequence[int], make: Callable[[Problem], Plan], judge: Callable[[Plan], float] | None
) -> Plan:
    """The best of the plans for these numbers of micro-batches of the problem's batch, bounded from below over all.

    `judge` knows seconds per step better than the closed form does, if given. Raises FleetTooSmall where nothing fits
    with any of them, and UserError for a count that does not divide the batch.
    """
    if not counts:
        raise UserError("micro_batches: got no counts, expected at least one")
    found: list[tuple[Problem, Plan]] = []
    refused: FleetTooSmall | None = None
    for count in dict.fromkeys(counts):
        cut = problem.cut_into(count)
        try:
            found.append((cut, make(cut)))
        except FleetTooSmall as error:
            refused = error
    if refused is not None and not found:
        raise refused
    if len(found) == 1:
        return found[0][1]
    cut, best = min(found, key=lambda f: preference(*f, judge(f[1]) if judge is not None else None))
    others = ", ".join(str(plan.micro_batches) for _, plan in found if plan is not best)
    note = f"of {best.micro_batches} or {others} micro-batches, {best.micro_batches} are best"
    return msgspec.structs.replace(_bounded(cut, best, [plan for _, plan in found]), notes=(note, *best.notes))


def _bounded(problem: Problem, best: Plan, plans: Sequence[Plan]) -> Plan:
    """With the least of the plans' bounds, if all have one of what is minimised."""
    objective = "cost" if problem.terms.objective == "cost" else "step"
    proven = [plan.certificate for plan in plans if plan.certificate is not None]
    if len(proven) < len(plans) or any(c.objective != objective for c in proven):
        return msgspec.structs.replace(best, certificate=None)
    least = min(proven, key=lambda c: c.lower_bound)
    certify = price_certificate if objective == "cost" else step_certificate
    scope = f"{least.scope}; with {' or '.join(str(plan.micro_batches) for plan in plans)} micro-batches"
    return msgspec.structs.replace(best, certificate=certify(least.lower_bound, preference(problem, best)[0], scope))
