"""The plans of several planners side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from isthmus.api.make_plan import make, predict
from isthmus.api.observer import Observer
from isthmus.api.proof import proven
from isthmus.api.search import searched
from isthmus.cost import Problem, step_price
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, fleet_of, prepare
from isthmus.planners import (
    INTERRUPTED,
    LeastBound,
    SearchStopped,
    can_price,
    check_planner,
    cut_short,
    least,
    planner_names,
)
from isthmus.report import ComparedPlan, Comparison, least_headroom, ranked
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.processes.signals import Stop
from isthmus.trace import steady_step_s


class Compared(NamedTuple):
    comparison: Comparison
    refusals: list[UserError]
    """Of planners that made no plan, in the order in which they were asked."""


def compare_planners(job: Job, planners: str, observer: Observer, stop: Stop) -> Compared:
    """Plan with each planner, simulate each plan. The model is captured once."""
    names, fleet = chosen_planners(planners), fleet_of(job)
    prepared = prepare(job)
    rows, refusals = searched(observer, stop, lambda: _rows(names, prepared, fleet), best_so_far=True)
    return Compared(
        Comparison(
            model=job.model.name,
            fleet=fleet.name,
            batch=job.training.batch_size,
            objective=job.plan.objective,
            rows=ranked(rows, job.plan.objective),
            not_asked=tuple(names[len(rows) :]),
        ),
        refusals,
    )


def _rows(names: Sequence[str], prepared: Prepared, fleet: Fleet) -> tuple[list[ComparedPlan], list[UserError]]:
    """A row per planner, and the refusals. Where planning is interrupted, of those that were asked till then;
    SearchStopped where none has a plan."""
    rows, refusals, bounds = list[ComparedPlan](), list[UserError](), dict[int, LeastBound]()

    def bound(problem: Problem) -> LeastBound:
        """The same for all planners, and computed before the first is timed."""
        return bounds[problem.micro_batches]

    problem, counts = prepared.problem(fleet), prepared.job.counts
    for count in counts:
        bounds[count] = least(problem.cut_into(count))
    lowest = min(bounds, key=lambda count: bounds[count].bound)
    bounds[lowest] = proven(problem, bounds[lowest], counts)
    for name in names:
        try:
            row, refusal = _row(name, prepared, fleet, bound)
        except SearchStopped:
            if len(rows) == len(refusals):
                raise
            break
        rows.append(row)
        refusals += [refusal] if refusal is not None else []
        if cut_short():
            break
    return rows, refusals


def chosen_planners(text: str) -> list[str]:
    """`all`, or names parted by commas, each once. UserError for an unknown name, or none."""
    if text == "all":
        return planner_names()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--compare: got {text!r}, expected 'all' or planners such as 'even,chain'")
    for name in names:
        check_planner(name)
    return names


def _row(
    name: str, prepared: Prepared, fleet: Fleet, bound: Callable[[Problem], LeastBound]
) -> tuple[ComparedPlan, UserError | None]:
    """The planner's row, and why it made no plan."""
    problem = prepared.problem(fleet)  # a new one each: no planner profits from what another left in its caches
    start_s = time.perf_counter()
    try:
        # What a planner makes that knows no prices has one all the same.
        plan = make(prepared.job, problem, name, bound, timed=not can_price(name))
    except UserError as refusal:
        plan_s = time.perf_counter() - start_s
        return ComparedPlan(planner=name, plan_s=plan_s, refused=str(refusal)), refusal
    plan_s = time.perf_counter() - start_s
    simulated_s = steady_step_s(predict(prepared, plan, fleet, run_spec(prepared.cut_into(plan.micro_batches))))
    certificate = plan.certificate
    least = None if certificate is None else certificate.lower_bound
    priced = certificate is not None and certificate.objective == "cost"
    row = ComparedPlan(
        planner=name,
        plan_s=plan_s,
        interrupted=INTERRUPTED in plan.notes,
        step_s=plan.predicted.step_s,
        simulated_step_s=simulated_s,
        price_per_1000_steps=1000 * step_price(plan, fleet, simulated_s).total,
        lower_bound_s=None if priced else least,
        lower_bound_per_1000_steps=1000 * least if priced and least is not None else None,
        question=None if certificate is None else certificate.question,
        exact=certificate is not None and certificate.exact,
        gap=None if certificate is None else certificate.gap,
        headroom=least_headroom(plan, fleet),
        devices=len(plan.used),
        replicas=len(plan.replicas),
        micro_batches=plan.micro_batches,
    )
    return row, None
