"""Into how many micro-batches a batch is cut.

More micro-batches fill the pipeline sooner, fewer send latency less often. The cost model knows no overhead of a small
tasklet, so it is the caller who says which counts may be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from isthmus.cost import Problem, preference
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners.observer import SearchStopped, cut_short
from isthmus.plans import Plan

INTERRUPTED = "planning was interrupted: this is the best plan that was found till then"


def over_counts(
    problem: Problem,
    counts: Sequence[int],
    make: Callable[[Problem], Plan],
    judge: Callable[[Plan], float] | None,
) -> Plan:
    """The best of the plans for these numbers of micro-batches of the problem's batch, without a certificate: what a
    planner proved of another figure is a note.

    `judge` knows seconds per step better than the closed form does, if given. Raises FleetTooSmall where nothing fits
    with any of them, UserError for a count that does not divide the batch, and SearchStopped where planning was ended
    before there was a plan.
    """
    if not counts:
        raise UserError("micro_batches: got no counts, expected at least one")
    counts = tuple(dict.fromkeys(counts))
    found: list[tuple[Problem, Plan]] = []
    refused: FleetTooSmall | None = None
    for count in counts:
        cut = problem.cut_into(count)
        try:
            found.append((cut, make(cut)))
        except FleetTooSmall as error:
            refused = error
        except SearchStopped:
            if not found:
                raise
        if cut_short():
            break
    if refused is not None and not found:
        raise refused
    best = _best(found, judge)
    others = ", ".join(str(plan.micro_batches) for _, plan in found if plan is not best)
    notes = [INTERRUPTED] if cut_short() else []
    notes += [f"of {best.micro_batches} or {others} micro-batches, {best.micro_batches} are best"] if others else []
    notes += [_claim(best)] if best.certificate is not None else []
    return msgspec.structs.replace(best, certificate=None, notes=(*notes, *best.notes))


def _best(found: Sequence[tuple[Problem, Plan]], judge: Callable[[Plan], float] | None) -> Plan:
    if judge is not None and not cut_short():
        with contextlib.suppress(SearchStopped):
            return min(found, key=lambda f: preference(*f, judge(f[1])))[1]
    return min(found, key=lambda f: preference(*f))[1]


def _claim(plan: Plan) -> str:
    """Return a note on a planner's proof of another question than the certificate's."""
    own = plan.certificate
    assert own is not None, "asked for only where there is one"
    value = f"{own.lower_bound:.6g}{'' if own.objective == 'cost' else ' s'}"
    return f"{plan.planner} proved {value} to be a lower bound on {own.question} (gap {own.gap:.2%})"
