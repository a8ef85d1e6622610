"""A plan document states no more than its check proves: what `isthmus plan` writes, `isthmus plan --verify` accepts.

A planner may prove a bound by more work than a check may be. Then the document states the highest bound that the check
proves, and what the planner proved is a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import msgspec

from isthmus.cost import Problem
from isthmus.planners import LeastBound
from isthmus.planners.least import with_certificate
from isthmus.plans import Plan
from isthmus.verification import Question, StateBytes, provable

ROUNDING = 1 + 1e-7
"""Factor between a bound and what attains it."""
EFFORT = 0.25
"""Share of the work of a check that may be spent while planning: what is proven with it, any check proves."""


def as_proven(problem: Problem, plan: Plan, counts: Sequence[int]) -> Plan:
    """The plan with a bound over these numbers of micro-batches that a check proves."""
    certificate = plan.certificate
    if certificate is None:
        return plan
    found = LeastBound(certificate.lower_bound, certificate.exact)
    checked = proven(problem, found, counts, reached=not certificate.gap)
    if checked == found:
        return plan
    proved = f"{plan.planner} proved {found.bound:.6g} to be a lower bound, by more work than a check does"
    notes = (*plan.notes, proved) if checked.bound < found.bound else plan.notes
    cut = problem.cut_into(plan.micro_batches)
    return msgspec.structs.replace(with_certificate(cut, plan, checked, counts), notes=notes)


def proven(problem: Problem, least: LeastBound, counts: Sequence[int], *, reached: bool = False) -> LeastBound:
    """The bound, or the highest below it that a check proves. `reached` by a plan that is known, it need not be
    found to be exact."""
    if not isfinite(least.bound) or least.bound <= 0:
        return least
    question = question_of(problem, counts)
    found = provable(question, least.bound, attained=least.exact and not reached, effort=EFFORT)
    if found.bound * ROUNDING >= least.bound and (reached or not least.exact or found.known <= least.bound * ROUNDING):
        return least
    if least.exact and not reached:  # to find no plan below is less work than to find the one that attains it
        found = provable(question, least.bound, attained=False, effort=EFFORT)
    return LeastBound(found.bound, exact=False)


def question_of(problem: Problem, counts: Sequence[int]) -> Question:
    """The problem in the words of the check."""
    state = problem.state
    return Question(
        graph=problem.flow.graph,
        fleet=problem.fleet,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        period=problem.sync.period,
        state=StateBytes(master=state.master_bytes, gradient=state.gradient_bytes, optimizer=state.optimizer_bytes),
        constraints=problem.constraints,
        recompute=problem.recompute,
        counts=tuple(counts),
        gradients=problem.sync.mode == "every-step",
    )
