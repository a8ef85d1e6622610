"""A plan document states no more than its check proves: what `isthmus plan` writes, `isthmus plan --verify` accepts.

A planner may prove a bound by more work than a check may be. Then the document states the highest bound that the check
proves, and what the planner proved is a note. Where the check's own relaxation proves more than the planner did, the
document states that: as far as a little work goes, or for the seconds that are asked for. A plan that the proof comes
upon, and that is better, takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import msgspec

from isthmus.api.observer import Observer, Silent
from isthmus.cost import PlanLayout, Problem, build_replicas, preference
from isthmus.errors import FleetTooSmall
from isthmus.planners import LeastBound, cut_short
from isthmus.planners.bounds import with_certificate
from isthmus.plans import Plan
from isthmus.units import format_duration
from isthmus.verification import MOST_WORK, ProofProgress, Prover, Question, StateBytes, provable, verify
from isthmus.verification.closed_form import Setup

ROUNDING = 1 + 1e-7  # factor between a bound and what attains it
EFFORT = 0.1  # share of the work of a check that may be spent while planning: what is proven with it, any check proves
PROVING = 0.6  # share of the work of a check that may go into a bound that is raised for given seconds
PLANNING_WORK = 4.5e8  # entries of arrays that the relaxation may fill while planning; 10^8 to 3 * 10^8 are a second


class Proving(NamedTuple):
    """The time for which a bound is raised, and who gets a line for each gain."""

    seconds: float | None = None  # None: a little work, the same on every machine
    observer: Observer = Silent()

    def ended(self) -> Callable[[int], bool]:
        """Return whether to end after so much work, from now on."""
        start_s = time.monotonic()

        def ended(work: int) -> bool:
            if work <= PLANNING_WORK:  # few seconds prove no less than none given
                return cut_short()
            if self.seconds is None:
                return True
            return time.monotonic() - start_s > self.seconds or work > PROVING * MOST_WORK or cut_short()

        return ended

    def teller(self, step_s: float) -> Callable[[ProofProgress], None]:
        """Notes the gap as it falls."""
        start_s = time.monotonic()

        def tell(progress: ProofProgress) -> None:
            if self.seconds is not None:
                gap = f"{max(0.0, step_s / progress.bound_s - 1):.1%}"
                spent = format_duration(time.monotonic() - start_s)
                self.observer.note(
                    f"by the formula at most {gap} above the best possible plan after {spent}; open: {progress.open}"
                )

        return tell


A_LITTLE = Proving()


class Raised(NamedTuple):
    least: LeastBound
    faster: tuple[Setup, ...] = ()  # the replicas of a plan below what is known


def as_proven(
    problem: Problem,
    plan: Plan,
    counts: Sequence[int],
    proving: Proving = A_LITTLE,
    judge: Callable[[Plan], float] | None = None,
) -> Plan:
    """The plan, or a better one that the proof came upon, with a bound over these numbers of micro-batches that a check
    proves. `judge` knows seconds per step better than the closed form does, if given."""
    plan = _checked(problem, plan, counts)
    certificate = plan.certificate
    if certificate is None or not certificate.gap or certificate.objective != "step" or cut_short():
        return plan
    least = LeastBound(certificate.lower_bound, certificate.exact)
    found = raised(problem, least, counts, plan.predicted.step_s, proving)
    if found.faster and plan.planner == "auto":
        plan = _better(problem, plan, found.faster, judge)
    if found.least.bound > certificate.lower_bound:
        least = _reached_by(found.least, plan.predicted.step_s)
    return with_certificate(problem.cut_into(plan.micro_batches), plan, least, counts)


def _better(problem: Problem, plan: Plan, setups: Sequence[Setup], judge: Callable[[Plan], float] | None) -> Plan:
    """These replicas as a plan if it is permitted and better, else the plan."""
    count = sum(setup.micro_batches for setup in setups)
    cut = replace(problem.cut_into(count), schedule=plan.replicas[0].schedule.name)
    used = {name for setup in setups for name in setup.devices}
    left_out = dict.fromkeys(
        (name for name in problem.fleet.names if name not in used), "no plan that was found is faster with it"
    )
    layouts = [PlanLayout(s.devices, s.starts[1:], s.micro_batches, s.recompute) for s in setups]
    try:
        made = build_replicas(cut, layouts, planner=plan.planner, notes=left_out)
    except FleetTooSmall:
        return plan
    before = problem.cut_into(plan.micro_batches)
    figures = (None, None) if judge is None else (judge(plan), judge(made))
    better = preference(cut, made, figures[1]) < preference(before, plan, figures[0])
    if not better or not verify(made, question_of(cut, (cut.micro_batches,))).holds():
        return plan
    note = f"found by the proof; the search's plan takes {format_duration(plan.predicted.step_s)}"
    return msgspec.structs.replace(made, notes=(note, *made.notes))


def raised(
    problem: Problem, least: LeastBound, counts: Sequence[int], step_s: float, proving: Proving = A_LITTLE
) -> Raised:
    """The bound, or that of the relaxation if it is higher: up to what a known plan takes."""
    prover = Prover(question_of(problem, counts), step_s / ROUNDING)
    bound_s = prover.run(proving.ended(), proving.teller(step_s))
    found = LeastBound(bound_s, exact=False) if bound_s > least.bound else least
    return Raised(_reached_by(found, step_s), prover.found)


def _reached_by(least: LeastBound, step_s: float) -> LeastBound:
    """Exact where a plan that takes so long is within rounding of it."""
    return LeastBound(step_s, exact=True) if least.bound * ROUNDING * ROUNDING >= step_s else least


def _checked(problem: Problem, plan: Plan, counts: Sequence[int]) -> Plan:
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
    """The bound, or the highest below it that a check proves, or the check's own where that is above it. `reached` by a
    plan that is known, it need not be found to be exact."""
    if not isfinite(least.bound) or least.bound <= 0:
        return least
    question = question_of(problem, counts)
    found = provable(question, least.bound, attained=least.exact and not reached, effort=EFFORT)
    if found.bound > least.bound * ROUNDING:
        return LeastBound(found.bound, exact=False)
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
        period=problem.sync.every,
        state=StateBytes(master=state.master_bytes, gradient=state.gradient_bytes, optimizer=state.optimizer_bytes),
        constraints=problem.constraints,
        recompute=problem.recompute,
        counts=tuple(counts),
        gradients=problem.sync.mode == "every-step",
    )
