"""The plan of a job: which one it is run with; made, explained, simulated, verified, and compared with those of other
planners.

The proof of a plan: a lower bound on the step of any plan of the job with one stage per device, or on its price,
by `verification`.

Planners prove nothing of it, and share no code with what does. A decision is the same for who states a bound and for
who checks it: what `isthmus plan` writes, `isthmus plan --verify` accepts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import RenderableType

from isthmus.api.forecast import Forecast
from isthmus.api.observer import Observer, Silent, searched
from isthmus.cost import Problem, build_again, layouts_of, step_price
from isthmus.cost.compressed import limited_as
from isthmus.data.description import description_file
from isthmus.errors import UserError, unknown_name
from isthmus.expected_loss import MEASURED_ON, boundary_increase
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job, Prepared, constraints_of, described_here, fleet_of, prepare
from isthmus.planners import (
    INTERRUPTED,
    SearchStopped,
    capabilities,
    check_constraints,
    check_planner,
    cut_short,
    over_counts,
    planner_names,
    scheduled,
)
from isthmus.planners import plan as make_plan
from isthmus.plans import Certificate, Plan, PlanPeriod, Replica, bounded_plans, load_plan, schedule_of
from isthmus.protocol import RunSpec
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
from isthmus.runtime.coordinator.stages import stage_pairs
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import SimulationOptions, simulate
from isthmus.simulator import simulate as simulate_plan
from isthmus.simulator.run import MOST_S
from isthmus.trace import Span, Trace, busy_share, link_bytes, steady_step_s, step_slope_s
from isthmus.units import format_duration, parse_duration
from isthmus.verification import (
    ProofProgress,
    Prover,
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

ROUNDING = 1e-7  # relative: a bound that is so close to a plan's step is attained
PLANNING_WORK = 3e7  # entries of arrays that decisions may fill while planning: half a second of one processor
PROVING_WORK = 1e11


class Proving(NamedTuple):
    """The time for which a bound is raised, and who gets a line for each gain."""

    seconds: float | None = None  # None: a little work, the same on every machine
    observer: Observer = Silent()

    def bound(self, question: Question, reached: float) -> float:
        """The highest that is proven of what any plan takes, up to what a known plan does."""
        start_s, seconds = time.monotonic(), self.seconds

        whose = bounded_plans(asked_in_words(question))

        def tell(progress: ProofProgress) -> None:
            if seconds is not None:
                gap, spent = f"{reached / progress.bound - 1:.1%}", format_duration(time.monotonic() - start_s)
                found = f"at most {gap} above the best {whose} after {spent}"
                self.observer.note(f"{found}; distinguished: {progress.distinguished}")

        def ended() -> bool:
            return cut_short() or (seconds is not None and time.monotonic() - start_s > seconds)

        prover = Prover(question, priced=is_priced(question))
        return prover.run(reached, PLANNING_WORK if seconds is None else PROVING_WORK, ended, tell)


A_LITTLE = Proving()


def with_bound(problem: Problem, plan: Plan, counts: Sequence[int], proving: Proving = A_LITTLE) -> Plan:
    """The plan, which has a simulated step, with what is proven over these numbers of micro-batches; without a
    certificate where nothing is, with a note where no proof is known."""
    question = question_of(problem, counts)
    reason = unproven(question)
    if reason is not None:
        return msgspec.structs.replace(plan, certificate=None, notes=(*plan.notes, reason))
    reached = reached_by(question, problem, plan)
    bound = proving.bound(question, reached) if reached else 0.0
    return msgspec.structs.replace(plan, certificate=certificate_of(question, reached, bound))


def reached_by(question: Question, problem: Problem, plan: Plan) -> float:
    """Seconds of a simulated step, or its price where that is bounded; 0 where it was not simulated."""
    steady_s = plan.predicted.steady_s
    return step_price(plan, problem.fleet, steady_s).total if steady_s and is_priced(question) else steady_s


def certificate_of(question: Question, reached: float, bound: float) -> Certificate | None:
    """None for a bound of 0, which proves nothing."""
    if bound <= 0:
        return None
    exact = bound >= reached * (1 - ROUNDING)
    bound = reached if exact else bound
    return Certificate(
        lower_bound=bound,
        gap=reached / bound - 1,
        objective="cost" if is_priced(question) else "step",
        question=asked_in_words(question),
        exact=exact,
    )


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


SIMULATED_STEPS = 8
OVERLAPPING_STEPS = 40
"""Simulated steps where they overlap (`delayed`): they settle late, and then differ by turns."""
SCORED_STEPS = 2
"""Simulated steps of a candidate, beside a period of averaging: the first step, which fills the pipeline, and the last,
which nothing follows."""
HEADER_BYTES = 400  # a frame's prefix and header, about: it matters on slow links with small tensors only


def fleet_for(job: Job) -> Fleet:
    """The job's fleet. It, the planner and the plan's terms are checked before the model is captured, which takes
    longer."""
    check_planner(job.planner)
    fleet = fleet_of(job)
    check_constraints(job.planner, constraints_of(job, fleet))
    return fleet


def make(
    job: Job,
    problem: Problem,
    planner: str | None = None,
    *,
    timed: bool = False,
    proving: Proving | None = A_LITTLE,
) -> Plan:
    """The plan of the job's planner, or of another, with the best of the job's numbers of micro-batches.

    `proving` says how far what no plan undercuts is raised; without it nothing is proven. `timed` lets the planner
    minimise time, whatever its plan is judged by.
    """

    simulated_in = partial(simulated_step_s, job, problem.fleet, problem.flow.graph.count is not None)

    def simulated_s(plan: Plan) -> float:
        return simulated_in(stated_steps(plan) if plan.overlaps else SCORED_STEPS, plan)

    def planned(cut: Problem) -> Plan:
        return make_plan(planner or job.planner, cut.timed() if timed else cut, simulated_s)

    plan = over_counts(problem, job.counts, planned, simulated_s)
    plan = with_steady(plan, simulated_in(stated_steps(plan), plan))
    return _with_boundary(job, plan if proving is None else with_bound(problem, plan, job.counts, proving))


def stated_steps(plan: Plan) -> int:
    """Simulated steps, beside a period of averaging, of a plan whose step is stated."""
    return OVERLAPPING_STEPS if plan.overlaps and _is_simulated(plan, OVERLAPPING_STEPS) else SIMULATED_STEPS


def _is_simulated(plan: Plan, steps: int) -> bool:
    return 2 * (steps + plan.period) * plan.predicted.step_s <= MOST_S


def simulated_step_s(job: Job, fleet: Fleet, counts: bool, steps: int, plan: Plan) -> float:
    """Seconds of a steady step of the job, of so many and a period. `counts`: the model's loss is a sum over a
    count."""
    options = SimulationOptions(clips=job.training.exchanges_norms, counts=counts, header_bytes=HEADER_BYTES)
    return step_in_simulation(plan, fleet, steps, options)


def step_in_simulation(plan: Plan, fleet: Fleet, steps: int, options: SimulationOptions) -> float:
    """Seconds of a steady step, of so many and a period; the formula's where they take longer than is simulated."""
    if not _is_simulated(plan, steps):
        return plan.predicted.step_s
    spec = RunSpec(steps=steps + plan.period, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
    trace = simulate(plan, fleet, spec, options)
    return step_slope_s(trace) if steps >= OVERLAPPING_STEPS else steady_step_s(trace, undisturbed=True)


def steady_on(prepared: Prepared, plan: Plan, fleet: Fleet) -> float:
    """Seconds of a steady step of the job's plan on a fleet."""
    counts = prepared.captured.train.count is not None
    return simulated_step_s(prepared.job, fleet, counts, stated_steps(plan), plan)


def with_steady(plan: Plan, steady_s: float) -> Plan:
    """The plan with these seconds of a simulated step."""
    return msgspec.structs.replace(plan, predicted=msgspec.structs.replace(plan.predicted, steady_s=steady_s))


def _with_boundary(job: Job, plan: Plan) -> Plan:
    """The plan with a note on what the model's boundary costs, where that was measured."""
    boundary = job.model.boundary
    if boundary is None or boundary.method == "none":
        return plan
    increase = boundary_increase(boundary.method, tuple(boundary.rates.values()) or (boundary.rate,))
    if not math.isfinite(increase):
        return plan
    note = f"boundary {boundary.method!r}: expected loss {increase:+.2%} without codecs, as measured on {MEASURED_ON}"
    return msgspec.structs.replace(plan, notes=(*plan.notes, note))


def plan_for(
    prepared: Prepared,
    fleet: Fleet,
    document: Path | None = None,
    proving: Proving | None = A_LITTLE,
) -> Plan:
    """A new plan to run; or the one in the document, where people may have moved cuts, swapped devices, set limits or
    chosen other codecs, whatever compression the job asks for.

    Where cuts or devices were edited, all else is computed anew. `proving` is that of `make`.
    """
    if document is None:
        plan = make(prepared.job, prepared.problem(fleet), proving=proving)
        check_feedback(prepared, plan, fleet)
        return plan
    plan = read_plan(prepared.job, fleet, document)
    problem = prepared.problem(fleet).cut_into(plan.micro_batches)
    for number, replica in enumerate(plan.replicas):
        _check_covers(replica, len(problem.flow.operators) - 1, f"plan file {document}: replicas[{number}]")
    try:
        again = scheduled(problem, build_again(problem, layouts_of(plan), plan))
        as_limited = limited_as(problem, again, [replica.schedule for replica in plan.replicas]).replicas
    except UserError as e:
        raise type(e)(f"plan file {document}: {e}") from None
    alike = _but_memory(as_limited) == _but_memory(plan.replicas)
    said = msgspec.structs.replace(plan.predicted, steady_s=0.0)  # which edited limits may change
    if alike and (again.predicted, again.sync) == (said, plan.sync):
        again = msgspec.structs.replace(plan, replicas=as_limited)  # other limits need other memory
    else:
        note = f"{document.name} is not as planner {plan.planner} left it: all figures were computed anew"
        again = msgspec.structs.replace(again, notes=(*again.notes, note))
    return with_steady(again, steady_on(prepared, again, fleet))


def _but_memory(replicas: Sequence[Replica]) -> list[object]:
    return [
        msgspec.structs.asdict(replica)
        | {"stages": [msgspec.structs.asdict(stage) | {"memory": None} for stage in replica.stages]}
        for replica in replicas
    ]


def _check_covers(replica: Replica, last: int, source: str) -> None:
    ends = [-1, *(stage.last for stage in replica.stages)]
    if any(s.first != end + 1 for s, end in zip(replica.stages, ends, strict=False)) or ends[-1] != last:
        ranges = ", ".join(f"{stage.first}..{stage.last}" for stage in replica.stages)
        raise UserError(
            f"{source}: stages run operators {ranges}, the model has 0..{last}, each in one stage: "
            "it was made for another model, or an edit left a gap"
        )


def read_plan(job: Job, fleet: Fleet, document: Path) -> Plan:
    """A plan document; UserError when it is for another model, batch or schedule, or names an unknown device."""
    plan = load_plan(document)
    if not plan.replicas:
        raise UserError(f"plan file {document}: replicas: got none, expected at least one")
    numbers = job.counts if job.training.micro_batches else (*job.counts, 1)  # what it may be by default
    if plan.micro_batches in numbers:
        job = job.cut_into(plan.micro_batches)
    schedule = plan.replicas[0].schedule.name
    for field, got, expected in (
        ("model", plan.model, job.model.name),
        ("micro_batches", plan.micro_batches, job.micro_batches),
        ("micro_batch_size", plan.micro_batch_size, job.micro_batch_size),
        ("schedule.name", schedule, schedule_of(job.schedule, schedule)),
    ):
        if got != expected:
            raise UserError(f"plan file {document}: {field}: got {got!r}, the job has {expected!r}")
    unknown = [device for device in plan.devices if device not in fleet.names]
    if unknown:
        raise UserError(f"plan file {document}: {unknown_name('device', unknown[0], fleet.names)}")
    return plan


def plan_spec(job: Job, plan: Plan) -> RunSpec:
    """The job's training steps alone: what a plan without its model can be simulated for."""
    return RunSpec(steps=job.training.steps, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)


def simulation_options(prepared: Prepared, plan: Plan) -> SimulationOptions:
    return SimulationOptions(
        clips=prepared.job.training.exchanges_norms,
        counts=prepared.captured.train.count is not None,
        eval_edges=eval_edges(prepared, plan),
        header_bytes=HEADER_BYTES,
    )


def eval_edges(prepared: Prepared, plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes per micro-batch that an evaluation sends from worker to worker."""
    edges: dict[tuple[int, int], int] = {}
    for pair in stage_pairs(plan, prepared.captured, clips=prepared.job.training.exchanges_norms):
        for crossing in pair.evaluation.sends:
            key = (crossing.source, crossing.target)
            edges[key] = edges.get(key, 0) + crossing.spec.nbytes(plan.micro_batch_size)
    return edges


def predict(prepared: Prepared, plan: Plan, fleet: Fleet, spec: RunSpec) -> Trace:
    """A few steps of the run on the virtual clock."""
    steps = min(spec.steps, spec.start_step + max(SIMULATED_STEPS, SCORED_STEPS + plan.period))
    return simulate(plan, fleet, msgspec.structs.replace(spec, steps=steps), simulation_options(prepared, plan))


def predict_periods(prepared: Prepared, periods: Sequence[PlanPeriod]) -> Trace:
    """A few steps under each of a run's plans, from the step and the time on at which it came into force."""
    spans: list[Span] = []
    period, steps = 1, prepared.job.training.steps
    for number, one in enumerate(periods):
        end = min((later.first_step for later in periods[number + 1 :]), default=steps)
        if one.first_step >= end:
            continue
        cut = prepared.cut_into(one.plan.micro_batches)
        found = predict(cut, one.plan, one.fleet, run_spec(cut, one.first_step))
        period = found.period
        spans += [
            msgspec.structs.replace(span, start_s=span.start_s + one.since_s, end_s=span.end_s + one.since_s)
            for span in found.spans
            if span.step < end
        ]
    return Trace(source="simulator", run=prepared.job.name, spans=tuple(spans), period=period)


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
    step_s: float  # of a steady step
    plan: Plan
    fleet: Fleet
    graph: OpGraph | None  # None of a plan that was given: the model is not captured for it

    def summary(self) -> dict[str, object]:
        """Return the summary for JSON: seconds of a step by simulator and formulas, devices' shares, links' bytes."""
        predicted = self.plan.predicted
        return {
            "step_s": self.step_s,
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
            f"simulated step {format_duration(self.step_s)}",
            f"by the formula {format_duration(predicted.step_s)}",
            f"by FusionLLM's Eq. 3 {format_duration(predicted.eq3_step_s)}: with the latency of every micro-batch",
            *(f"  {device}: computing {share:.0%}" for device, share in busy_share(self.trace).items()),
        ]


def simulate_job(job: Job, observer: Observer, stop: Stop, document: Path | None = None) -> Simulated:
    """Simulate the plan document, or the plan that is made."""
    fleet = fleet_for(job)
    if document is not None:  # a plan says all that the virtual clock needs: the model is not captured
        plan = read_plan(job, fleet, document)
        options = SimulationOptions(clips=job.training.exchanges_norms, header_bytes=HEADER_BYTES)
        trace = simulate_plan(plan, fleet, plan_spec(job, plan), options)
        step_s = _steady_in(trace, plan, fleet, options)
        return Simulated(trace, step_s, with_steady(plan, step_s), fleet, None)
    prepared = prepare(job)
    plan = searched(observer, stop, lambda: make(prepared.job, prepared.problem(fleet)))
    spec = run_spec(prepared.cut_into(plan.micro_batches))
    options = simulation_options(prepared, plan)
    trace = simulate_plan(plan, fleet, spec, options)
    return Simulated(trace, _steady_in(trace, plan, fleet, options), plan, fleet, prepared.captured.train)


def _steady_in(trace: Trace, plan: Plan, fleet: Fleet, options: SimulationOptions) -> float:
    """Seconds of a steady step of the trace; where steps overlap, and settle late, of more steps."""
    if plan.overlaps and _is_simulated(plan, OVERLAPPING_STEPS):
        return step_in_simulation(plan, fleet, OVERLAPPING_STEPS, options)
    return steady_step_s(trace, undisturbed=True)


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
    simulated_s = partial(steady_on, prepared, fleet=fleet)
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
    simulated_s = plan.predicted.steady_s
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
