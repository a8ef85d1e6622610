"""Into how many micro-batches a batch is cut, and the bound over all of them.

More micro-batches fill the pipeline sooner, fewer send latency less often. The cost model knows no overhead of a small
tasklet, so it is the caller who says which counts may be.

The bound of one count: small problems are settled by trying every plan; elsewhere it is the lesser of a bound on one
replica, which `chain` may have made exact, and of one on several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from isthmus.cost import Problem, preference
from isthmus.cost.blocks import Blocks
from isthmus.cost.compression import packs_alike
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.errors import FleetTooSmall, UserError
from isthmus.planners.bounds import LeastBound, of_fed, prices, relaxed, settles, stated, with_certificate
from isthmus.planners.observer import SearchStopped, cut_short, part
from isthmus.planners.search.exhaustive import exhaustive_plan
from isthmus.planners.search.one_pipeline import chain
from isthmus.planners.search.orders import MOST_EXHAUSTIVE
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.plans import Plan

INTERRUPTED = "planning was interrupted: this is the best plan that was found till then"


def over_counts(
    problem: Problem,
    counts: Sequence[int],
    make: Callable[[Problem], Plan],
    judge: Callable[[Plan], float] | None,
    bound: Callable[[Problem], LeastBound] | None = None,
) -> Plan:
    """The best of the plans for these numbers of micro-batches of the problem's batch, with the certificate over all.

    `judge` knows seconds per step better than the closed form does, if given; `bound` is what no plan of a problem
    undercuts, by default what a planner proved of it, or `least`. Raises FleetTooSmall where nothing fits with any of
    them, UserError for a count that does not divide the batch, and SearchStopped where planning was ended before there
    was a plan.
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
    cut, best = _best(found, judge)
    known = {c.micro_batches: stated(c, plan.certificate) for c, plan in found}
    if bound is None:
        bounds = [known.get(count) or least(problem.cut_into(count)) for count in counts]
    else:
        bounds = [bound(problem.cut_into(count)) for count in counts]
    certified = with_certificate(cut, best, min(bounds, key=lambda b: b.bound), counts)
    others = ", ".join(str(plan.micro_batches) for _, plan in found if plan is not best)
    notes = [INTERRUPTED] if cut_short() else []
    notes += [f"of {best.micro_batches} or {others} micro-batches, {best.micro_batches} are best"] if others else []
    notes += [_claim(best)] if known[cut.micro_batches] is None and best.certificate is not None else []
    return msgspec.structs.replace(certified, notes=(*notes, *best.notes))


def _best(found: Sequence[tuple[Problem, Plan]], judge: Callable[[Plan], float] | None) -> tuple[Problem, Plan]:
    if judge is not None and not cut_short():
        with contextlib.suppress(SearchStopped):
            return min(found, key=lambda f: preference(*f, judge(f[1])))
    return min(found, key=lambda f: preference(*f))


def least(problem: Problem) -> LeastBound:
    """The bound on any plan of the problem, with its own number of micro-batches; where planning is ended early, that
    of the relaxation."""
    if problem.schedule not in ("1f1b", "gpipe"):  # the relaxations count each backward whole, in steps that drain
        return LeastBound(0.0, exact=False)
    if problem.constraints.lacking:
        return least(problem.everywhere())._replace(exact=False)
    if problem.constraints.objective == "cost" and not prices(problem):
        problem = problem.timed()  # where nothing has a price the fastest plan is as cheap as any
    part("lower bound")
    if problem.constraints.copied:
        return of_fed(chain(problem))
    network, blocks = network_of(problem), Blocks(problem)
    try:
        if pruned_fleet(problem, network, blocks) is problem:
            return _searched(problem, network, blocks)
    except SearchStopped:
        pass
    return relaxed(problem, network, blocks, None)


def _searched(problem: Problem, network: FleetNetwork, blocks: Blocks) -> LeastBound:
    single: Plan | None = None
    if len(network.names) <= MOST_EXHAUSTIVE:  # beyond, `chain` proves no more than the relaxation
        with contextlib.suppress(FleetTooSmall):
            single = chain(problem)
    if settles(problem):
        known_s = single.predicted.step_s if single is not None else float("inf")
        settled = exhaustive_plan(problem, network, blocks, known_s)
        if settled is not None:
            return LeastBound(settled.bound, exact=packs_alike(problem))
    return relaxed(problem, network, blocks, single)


def _claim(plan: Plan) -> str:
    """Return a note on a planner's proof of another question than the certificate's."""
    own = plan.certificate
    assert own is not None, "asked for only where there is one"
    value = f"{own.lower_bound:.6g}{'' if own.objective == 'cost' else ' s'}"
    return f"{plan.planner} proved {value} to be a lower bound on {own.question} (gap {own.gap:.2%})"
