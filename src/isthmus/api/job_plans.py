"""The plan of a job: made and explained, simulated, verified, compared with the plans of other planners."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import RenderableType

from isthmus.api.forecast import Forecast
from isthmus.api.make_plan import (
    A_LITTLE,
    ROUNDING,
    SIMULATED_STEPS,
    Proving,
    fleet_for,
    make,
    plan_spec,
    predict,
    question_of,
    reached_by,
    read_plan,
    simulated_step_s,
    simulation_options,
    steady_on,
    with_steady,
)
from isthmus.api.observer import Observer, searched
from isthmus.cost import Problem, step_price
from isthmus.data.description import description_file
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job, Prepared, constraints_of, described_here, fleet_of, prepare
from isthmus.planners import INTERRUPTED, SearchStopped, capabilities, check_planner, cut_short, planner_names
from isthmus.plans import Plan, load_plan, schedule_of
from isthmus.report import (
    ComparedPlan,
    Comparison,
    Explanation,
    explain,
    least_headroom,
    plan_summary,
    plan_table,
    ranked,
)
from isthmus.report.graph_table import GraphWeights, graph_weights
from isthmus.runtime.coordinator.activation_privacy import protection_text
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.stage_assignments import check_feedback
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import SimulationOptions
from isthmus.simulator import simulate as simulate_plan
from isthmus.trace import Trace, busy_share, link_bytes, steady_step_s
from isthmus.units import format_duration, parse_duration
from isthmus.verification import (
    Question,
    StateBytes,
    Until,
    Verdict,
    asked_in_words,
    is_priced,
    state_bytes,
    unproven,
    verify,
)
from isthmus.verification.question import FLOAT32_BYTES


class Explained(NamedTuple):
    plan: Plan
    fleet: Fleet
    graph: OpGraph
    explanation: Explanation | None  # why the plan looks as it does, if that was asked for
    leaving: list[str]  # the data that leave the data holders, in words


def plan_job(job: Job, observer: Observer, stop: Stop, *, words: bool = False, prove: str | None = None) -> Explained:
    """The plan that the job would be run with; with `words` explained.

    Its bound is raised for the duration `prove`, as "60 s". UserError for what is no duration.
    """
    proving = Proving(None if prove is None else parse_duration(prove, "--prove"), observer)
    fleet, prepared = fleet_for(job), prepare(job)
    problem = prepared.problem(fleet)
    plan = searched(observer, stop, lambda: make(prepared.job, problem, proving=proving), best_so_far=True)
    if prove is not None and plan.certificate is None:
        observer.note("--prove: nothing is proven of this plan")
    check_feedback(prepared, plan, fleet)
    explanation = explain(problem.cut_into(plan.micro_batches), plan, partial(steady_on, prepared)) if words else None
    return Explained(plan, fleet, prepared.captured.train, explanation, list(protection_text(prepared, plan, fleet)))


def weigh_model(job: Job) -> GraphWeights:
    """Return the computation and memory of each layer, and of each operator."""
    prepared = prepare(job)
    return graph_weights(prepared.flow, prepared.job.micro_batch_size)


class Simulated(Forecast, frozen=True):
    """The steps of one plan."""

    trace: Trace  # pyright: ignore[reportIncompatibleMethodOverride]
    plan: Plan
    fleet: Fleet
    graph: OpGraph | None  # None of a plan that was given: the model is not captured for it

    def summary(self) -> dict[str, object]:
        """Return the summary for JSON: seconds of a step by simulator and formulas, devices' shares, links' bytes."""
        predicted = self.plan.predicted
        return {
            "step_s": steady_step_s(self.trace, undisturbed=True),
            "closed_form_s": predicted.step_s,
            "eq3_s": predicted.eq3_step_s,
            "busy_share": busy_share(self.trace),
            "link_bytes": {f"{a} -> {b}": n for (a, b), n in link_bytes(self.trace).items()},
            "plan": msgspec.to_builtins(plan_summary(self.plan, self.fleet)),
        }

    def table(self) -> RenderableType:
        return plan_table(self.plan, self.fleet, self.graph)

    def lines(self) -> list[str]:
        """In words: a step's time, and how much of it each device computes."""
        predicted = self.plan.predicted
        return [
            f"simulated step {format_duration(steady_step_s(self.trace, undisturbed=True))}",
            f"by the formula {format_duration(predicted.step_s)}",
            f"by FusionLLM's Eq. 3 {format_duration(predicted.eq3_step_s)}: with the latency of every micro-batch",
            *(f"  {device}: computing {share:.0%}" for device, share in busy_share(self.trace).items()),
        ]


def simulate_job(job: Job, observer: Observer, stop: Stop, document: Path | None = None) -> Simulated:
    """Simulate the plan document, or the plan that is made."""
    fleet = fleet_for(job)
    if document is not None:  # a plan says all that the virtual clock needs: the model is not captured
        plan = read_plan(job, fleet, document)
        options = SimulationOptions(clips=job.training.exchanges_norms)
        trace = simulate_plan(plan, fleet, plan_spec(job, plan), options)
        return Simulated(trace, with_steady(plan, steady_step_s(trace, undisturbed=True)), fleet, None)
    prepared = prepare(job)
    plan = searched(observer, stop, lambda: make(prepared.job, prepared.problem(fleet)))
    spec = run_spec(prepared.cut_into(plan.micro_batches))
    trace = simulate_plan(plan, fleet, spec, simulation_options(prepared, plan))
    return Simulated(trace, plan, fleet, prepared.captured.train)


CHECK_S = 20.0  # for the bound: what takes longer was not checked


def verify_plan(job: Job, plan: Plan | Path, tell: Callable[[str], None] = lambda _: None) -> Verdict:
    """Verify a plan, or its document: its figures, and then its bound; `tell` hears how far that is. UserError for what
    is no plan document."""
    plan, fleet = plan if isinstance(plan, Plan) else load_plan(plan), fleet_of(job)
    if plan.micro_batches in job.counts:
        job = job.cut_into(plan.micro_batches)
    prepared = prepare(job)
    job = prepared.job
    question = Question(
        graph=prepared.captured.train,
        fleet=fleet,
        micro_batch_size=job.micro_batch_size,
        micro_batches=job.micro_batches,
        schedule=schedule_of(job.schedule, plan.replicas[0].schedule.name) if plan.replicas else job.schedule,
        period=job.sync.every,
        state=_state(job, narrow=prepared.trains_in_half),
        constraints=constraints_of(job, fleet, prepared.samples.holders, prepared.lacking(fleet)),
        recompute=job.plan.recompute,
        counts=job.counts,
        gradients=job.sync.mode == "every-step",
    )
    counts = prepared.captured.train.count is not None
    simulated_s = partial(simulated_step_s, job, fleet, counts, SIMULATED_STEPS)
    start_s = time.monotonic()
    until = Until(CHECK_S, lambda: time.monotonic() - start_s > CHECK_S)
    return verify(plan, question, until=until, simulated_s=simulated_s, tell=tell)


def _state(job: Job, *, narrow: bool) -> StateBytes:
    """Return the state of the optimizer that keeps the most: a stage may hold parameters of any."""
    largest = max(
        (state_bytes(o.name, momentum=o.momentum > 0, narrow=narrow) for o in job.optimizer),
        key=lambda state: state.optimizer,
    )
    outer = job.sync.outer
    tensors = 0 if outer is None else 1 + (outer.momentum > 0)
    previous = 0 if job.schedule != "delayed" else 2 if narrow else FLOAT32_BYTES
    return msgspec.structs.replace(largest, optimizer=largest.optimizer + FLOAT32_BYTES * tensors + previous)


class Compared(NamedTuple):
    comparison: Comparison
    refusals: list[UserError]  # refusals of planners that made no plan, in the order in which they were asked


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
    rows, refusals, plans = list[ComparedPlan](), list[UserError](), dict[str, Plan]()
    for name in names:
        try:
            row, refusal = _row(name, prepared, fleet, plans)
        except SearchStopped:
            if len(rows) == len(refusals):
                raise
            break
        rows.append(row)
        refusals += [refusal] if refusal is not None else []
        if cut_short():
            break
    return _bounded(prepared.problem(fleet), rows, plans, prepared.job.counts), refusals


def _bounded(
    problem: Problem, rows: list[ComparedPlan], plans: dict[str, Plan], counts: Sequence[int]
) -> list[ComparedPlan]:
    """With one bound for all, up to what the best of these plans takes."""
    question = question_of(problem, counts)
    if not plans or unproven(question) is not None or cut_short():
        return rows
    reached = {name: reached_by(question, problem, plan) for name, plan in plans.items()}
    bound = A_LITTLE.bound(question, min(reached.values()))
    if bound <= 0:
        return rows
    priced, exact = is_priced(question), min(reached.values()) <= bound * (1 + ROUNDING)
    return [
        msgspec.structs.replace(
            row,
            lower_bound_s=None if priced else bound,
            lower_bound_per_1000_steps=1000 * bound if priced else None,
            question=asked_in_words(question),
            exact=exact,
            gap=max(0.0, reached[row.planner] / bound - 1),
        )
        if row.planner in reached
        else row
        for row in rows
    ]


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


def _row(name: str, prepared: Prepared, fleet: Fleet, plans: dict[str, Plan]) -> tuple[ComparedPlan, UserError | None]:
    """The planner's row, and why it made no plan; the plan is added to the others."""
    problem = prepared.problem(fleet)  # a new one each: no planner profits from what another left in its caches
    start_s = time.perf_counter()
    try:
        # What a planner makes that knows no prices has one all the same.
        plan = make(prepared.job, problem, name, timed=not capabilities(name).prices, proving=None)
    except UserError as refusal:
        plan_s = time.perf_counter() - start_s
        return ComparedPlan(planner=name, plan_s=plan_s, refused=str(refusal)), refusal
    plan_s = time.perf_counter() - start_s
    simulated_s = steady_step_s(
        predict(prepared, plan, fleet, run_spec(prepared.cut_into(plan.micro_batches))), undisturbed=True
    )
    plans[name] = plan
    row = ComparedPlan(
        planner=name,
        plan_s=plan_s,
        interrupted=INTERRUPTED in plan.notes,
        step_s=plan.predicted.step_s,
        simulated_step_s=simulated_s,
        price_per_1000_steps=1000 * step_price(plan, fleet, simulated_s).total,
        headroom=least_headroom(plan, fleet),
        devices=len(plan.used),
        replicas=len(plan.replicas),
        micro_batches=plan.micro_batches,
    )
    return row, None


def describe_data(job: Job) -> bytes:
    """The text of a description file. Opens the data. UserError."""
    return description_file(job.used_data, described_here(job))
