"""The lower bound of all plans of a problem, by any planner: the one bound that certificates state.

It ranges over any number of replicas, whatever planner made the plan, so that the same plan of the same problem has the
same certificate. Small problems are settled by trying every plan; elsewhere it is the lesser of a bound on one replica,
which `chain` may have made exact, and of one on several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from isthmus.cost import Problem, is_priced, minimised
from isthmus.cost.blocks import Blocks
from isthmus.cost.compression import packs_alike
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.errors import FleetTooSmall
from isthmus.planners.bounds import certificate_of, pipeline_bound, replicas_price, replicas_step_s
from isthmus.planners.observer import SearchStopped, part
from isthmus.planners.search.chain import chain
from isthmus.planners.search.exhaustive import exhaustive_plan
from isthmus.planners.search.orders import MOST_EXHAUSTIVE
from isthmus.planners.search.prune_fleet import pruned_fleet
from isthmus.plans import Certificate, Plan, question_in_words


class LeastBound(NamedTuple):
    """A lower bound of what every plan of a problem takes, and whether the bound is attained."""

    bound: float
    """Seconds or money per step, by the problem's objective; infinite where no plan fits."""
    exact: bool
    """Whether some plan attains it."""


def least(problem: Problem) -> LeastBound:
    """The bound on any plan of the problem, with its own number of micro-batches; where planning is ended early, that
    of the relaxation."""
    if problem.schedule not in ("1f1b", "gpipe"):  # the relaxations count each backward whole, in steps that drain
        return LeastBound(0.0, exact=False)
    if problem.constraints.lacking:
        return least(problem.everywhere())._replace(exact=False)
    if problem.constraints.objective == "cost" and not _prices(problem):
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


def of_fed(plan: Plan) -> LeastBound:
    """What is proven where several holders feed one chain: there are no plans of several replicas."""
    proven = plan.certificate
    return LeastBound(proven.lower_bound, proven.exact) if proven is not None else LeastBound(0.0, exact=False)


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


def settles(problem: Problem) -> bool:
    """Whether every plan may be tried: time alone counts, nothing has a limit, the data are everywhere, and gradients
    are summed in every step."""
    constraints = problem.constraints
    free = not constraints.limited and not constraints.data_holders and problem.schedule != "delayed"
    return constraints.objective == "time" and free and problem.sync.mode == "every-step"


def relaxed(problem: Problem, network: FleetNetwork, blocks: Blocks, single: Plan | None) -> LeastBound:
    """The lesser of a bound on one replica, for which that of `chain`'s plan counts if given, and on several."""
    proven = single.certificate if single is not None else None
    alone, replicated = pipeline_bound(problem, network, blocks), float("inf")
    if problem.most_replicas > 1 and problem.constraints.objective == "cost":
        replicated = replicas_price(problem, network, blocks)
    elif problem.most_replicas > 1:
        replicated = replicas_step_s(network, blocks, problem.micro_batches, problem.sync.every)
    if proven is not None:
        alone = proven.lower_bound if proven.exact else max(alone, proven.lower_bound)
    return LeastBound(min(alone, replicated), exact=proven is not None and proven.exact and alone <= replicated)


def question(problem: Problem, counts: Sequence[int] = ()) -> str:
    """What `least` bounds, in words; over these numbers of micro-batches, by default the problem's own."""
    return question_in_words(
        problem.constraints,
        counts or (problem.micro_batches,),
        priced=_prices(problem),
        period=problem.sync.every,
        recompute=problem.recompute,
    )


def with_certificate(problem: Problem, plan: Plan, found: LeastBound, counts: Sequence[int] = ()) -> Plan:
    """The plan with what the bound proves of it. `problem` has the plan's number of micro-batches; `counts` are those
    over which the bound ranges."""
    priced = _prices(problem)
    reached = minimised(problem.unlimited("cost" if priced else "time"), plan)
    certificate = certificate_of(found.bound, reached, question(problem, counts), exact=found.exact, priced=priced)
    return msgspec.structs.replace(plan, certificate=certificate)


def stated(problem: Problem, certificate: Certificate | None) -> LeastBound | None:
    """The bound in a certificate, if it answers the problem's question."""
    if certificate is None or certificate.question != question(problem):
        return None
    return LeastBound(certificate.lower_bound, certificate.exact)


def claim(plan: Plan) -> str:
    """What a planner proved of another question than that of the certificate, as a note."""
    own = plan.certificate
    assert own is not None, "asked for only where there is one"
    value = f"{own.lower_bound:.6g}{'' if own.objective == 'cost' else ' s'}"
    return f"{plan.planner} proved {value} to be a lower bound on {own.question} (gap {own.gap:.2%})"


def _prices(problem: Problem) -> bool:
    """On a fleet where nothing has a price the fastest plan is sought, and time is bounded."""
    return problem.constraints.objective == "cost" and is_priced(problem.fleet)
