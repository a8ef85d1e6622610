"""The program of a pipeline: plan, run, watch, compare, and leave a folder that explains it all; or simulate it with
faults: detection, recovery, new plans and goodput, by the machines of a real run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import RenderableType
from torch import nn

from isthmus.api.audit import Audited, BackgroundAudits, IdleDevices, audit_run
from isthmus.api.folder import RunFolder
from isthmus.api.forecast import Forecast, Simulating, StruckRun
from isthmus.api.job_overrides import Changes
from isthmus.api.make_plan import (
    eval_edges,
    fleet_for,
    plan_for,
    predict_periods,
    read_plan,
    simulate_job,
    simulation_options,
    steady_on,
)
from isthmus.api.observer import Observer, searched
from isthmus.api.run import Run, Traced, compared, draw_metrics, finite_points, loss_unit, trace_sessions
from isthmus.api.run_session import Choices, run_started
from isthmus.api.serving_fleet import is_known
from isthmus.api.watch import PipelineWatch, Ran, Watch
from isthmus.data.description import difference, joined_descriptions
from isthmus.data.registry import refuse_paths
from isthmus.disclosure import PrivacySpent, read_spent
from isthmus.documents import differences
from isthmus.errors import UserError, unknown_name
from isthmus.federated.admission import Guarantee
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph, encode
from isthmus.job import Job, Prepared, constraints_of, described_in, fleet_of, keep_prepared, kept_prepared, prepare
from isthmus.job.first_weights import FirstWeights, begin_first_weights, in_stores
from isthmus.models import model_names
from isthmus.models.registry import own_names
from isthmus.plans import Plan
from isthmus.protocol.drift import fit_fleet
from isthmus.report import (
    draw_faults,
    draw_loss,
    draw_plan,
    draw_timeline,
    during,
    last_period,
    memory_use,
    plan_table,
    run_summary,
)
from isthmus.report.tables import fitted_text
from isthmus.runtime.coordinator.activation_privacy import protection_text
from isthmus.runtime.coordinator.backend import Backend, LocalBackend, local_places
from isthmus.runtime.coordinator.data_holders import DataHolders, agreed, unchanged
from isthmus.runtime.coordinator.plans import Plans
from isthmus.runtime.coordinator.recovery_record import RecoveryRecord, read_record
from isthmus.runtime.coordinator.run import RunOptions, Watcher, late_warnings, manifest_of, run_plan, run_spec
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.coordinator.stages import readers
from isthmus.runtime.decoupled.merged_run import seeded_model
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.device_processes import fork_before_threads as fork_before_threads
from isthmus.runtime.processes.signals import Stop
from isthmus.sanitize import sanitize
from isthmus.session.session import START_S
from isthmus.simulator import Fault, RecoveryTimes, SimulatedRun, simulate_run
from isthmus.simulator.options import fault_text, parse_fault
from isthmus.simulator.queue import RunOfJob
from isthmus.simulator.run import RunSimulation, check_faults
from isthmus.trace import Trace
from isthmus.training.checkpoint import (
    check_shapes,
    latest_checkpoint,
    load_checkpoint,
    newest_whole_checkpoint,
    read_manifest,
)
from isthmus.training.engine_operators import engine_operators
from isthmus.units import format_duration


def read_faults(options: Mapping[str, Sequence[str] | None]) -> tuple[Fault, ...]:
    """Read `--fault`, `--slow`, `--join` and `--leave`, in order of time. UserError for a value that is none."""
    found = [parse_fault(text, option) for option, texts in options.items() for text in texts or ()]
    return tuple(sorted(found, key=lambda fault: fault.time_s))


class FaultedRun(StruckRun, frozen=True, kw_only=True):
    """The simulated run, beside the same run without faults."""

    run: SimulatedRun
    plan: Plan  # the first one
    fleet: Fleet
    graph: OpGraph

    @property
    def trace(self) -> Trace:
        return self.run.trace

    @property
    def as_job(self) -> RunOfJob:
        return RunOfJob(self.run.seconds, self.run.finish.reason, self.plan.used, self.without_effect)

    @property
    def steps(self) -> int:
        """Return the steps that the result has behind it: also those that were done while the coordinator was away."""
        return self.run.done_s[-1][1] + 1 if self.run.done_s else 0

    @property
    def redone(self) -> int:
        return len(self.run.done_s) - len({step for _, step in self.run.done_s})

    @property
    def goodput(self) -> float:
        """Steps of the result per second of the run."""
        return self.steps / self.run.seconds if self.run.seconds else 0.0

    def notes(self) -> Iterable[tuple[float, str]]:
        yield from self.run.notes
        for number, period in enumerate(self.run.periods[1:], 1):
            step_s, devices = period.plan.predicted.expected_s, ", ".join(dict.fromkeys(period.plan.devices))
            yield period.since_s, f"plan {number}: {devices}; a step should take {format_duration(step_s)}"

    def table(self) -> RenderableType:
        return plan_table(self.plan, self.fleet, self.graph)

    def lines(self) -> list[str]:
        rate = f"{self.goodput:.3g} steps/s; {self.redone} done twice"
        return [
            *self.struck_lines(),
            self.concluded(f"{self.steps} steps in {format_duration(self.run.seconds)}: {rate}"),
        ]

    def summary(self) -> dict[str, object]:
        run = self.run
        return self.ended() | {
            "steps": self.steps,
            "steps_done_twice": self.redone,
            "goodput_steps_per_s": self.goodput,
            "recoveries": [
                {**msgspec.to_builtins(recovery), "detected_after_s": self._detected_after_s(number)}
                for number, recovery in enumerate(run.recoveries)
            ],
            "plans": [
                {"since_s": p.since_s, "first_step": p.first_step, "devices": list(p.plan.devices)} for p in run.periods
            ],
        }

    def _detected_after_s(self, number: int) -> float | None:
        """From the newest fault until devices were stopped for it; None for a change of plan that was nobody's
        fault."""
        (begin_s, _), recovery = self.run.recovered_s[number], self.run.recoveries[number]
        before = [f.time_s for f in self.faults if f.kind in ("lost", "silent", "link", "coordinator")]
        before = [time_s for time_s in before if time_s <= begin_s]
        return begin_s - max(before) if before and not recovery.reason.startswith("the plan is changed") else None

    def draw(self, path: Path) -> None:
        marks = [(fault.time_s, fault_text(fault)) for fault in self.faults]
        draw_faults(self.run.done_s, marks, self.run.recovered_s, path, seconds=self.run.seconds)


def simulate_faults(
    job: Job, faults: tuple[Fault, ...], observer: Observer, stop: Stop, document: Path | None = None
) -> FaultedRun:
    """The job's whole run, under the plan document or the plan that is made.

    UserError for a fault of what the fleet does not have, or where no plan can be made."""
    fleet = fleet_for(job)
    check_faults(faults, fleet)
    joining = {fault.device for fault in faults if fault.kind == "join"}
    present = [name for name in fleet.names if name not in joining]
    if not present:
        raise UserError(
            f"--join: got all devices ({', '.join(fleet.names)}), expected one that is there from the start"
        )
    prepared = prepare(job)
    plan = searched(observer, stop, lambda: plan_for(prepared, fleet.subset(present), document))
    kept = msgspec.structs.replace(job.plan, micro_batches=())
    prepared = prepared.cut_into(plan.micro_batches)
    again = msgspec.structs.replace(prepared, job=msgspec.structs.replace(prepared.job, plan=kept))
    replan = partial(plan_for, again, proving=None)  # nobody reads what is proven of these
    planner = _Planner(prepared, plan, fleet, replan, emulate=False, steady_s=partial(steady_on, again))
    ways = {name: 1.0 / fleet.line_bytes_per_s(name) for name in fleet.names}
    times = RecoveryTimes(timeout_s=job.timeout_s, start_s=START_S, control_s_per_byte=ways)
    unused = tuple(Fault(kind="join", device=name, time_s=0) for name in present if name not in plan.devices)
    options = msgspec.structs.replace(simulation_options(prepared, plan), faults=(*unused, *faults), recovery=times)
    spec = run_spec(prepared)
    run = RunSimulation(plan, fleet, spec, options, planner=planner, layout=planner.now.layout).run()
    return FaultedRun(
        run=run,
        plan=plan,
        fleet=fleet,
        graph=prepared.captured.train,
        faults=faults,
        undisturbed_s=simulate_run(plan, fleet, spec, msgspec.structs.replace(options, faults=())).seconds,
    )


class _Planner(Plans):
    """The plans of a run that is simulated: those that the real one would make."""

    def eval_edges(self, plan: Plan) -> Mapping[tuple[int, int], int]:
        return eval_edges(self._prepared, plan)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's job as its program, whose methods every program has."""

    job: Job

    def check(self, *, on_fleet: bool, plan: Path | None = None) -> None:
        """UserError for a job that cannot run here, or on devices or sites of a fleet, or by a plan document."""
        if on_fleet:
            fleet_of(self.job)

    def run(self, choices: Choices, watch: Watch, stop: Stop) -> Ran | None:
        """Plan, run and compare. None where nothing is left to do."""
        folder, observer, start = watch.folder, watch.observer, start_of(self.job, choices, watch)
        if start is None:
            return None
        planned = _planned(self.job, choices, folder, start, observer, stop)
        outcome = _carry_out(planned, start, watch, stop)
        explain = partial(_explain, planned, outcome, folder, observer)
        return Ran(outcome.outcome, outcome.reason, outcome.failure, explain)

    def simulated(self, how: Simulating, observer: Observer, stop: Stop) -> Forecast:
        """The run on a virtual clock. UserError as of `check`, and for an option that is not for this program."""
        if how.steps is None:
            return simulate_faults(self.job, how.faults, observer, stop, how.plan)
        return simulate_job(Changes(steps=how.steps).of(self.job), observer, stop, how.plan)

    def rehearsed(self, observer: Observer, stop: Stop) -> Forecast | None:
        """The run that `train` would make here; None where its plan says how it goes."""
        places_of(self.job)

    def trained(self, folder: RunFolder, note: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, int]:
        """The run's model with the newest weights that are whole, and how many steps or rounds that is."""
        model = seeded_model(self.job)  # what a checkpoint leaves out may have been drawn: a new head
        return model, self.load(folder, model)

    def load(self, folder: RunFolder, model: nn.Module) -> int:
        """Put them into a module like the run's."""
        named = partial(own_names, self.job.model.name)
        return load_checkpoint(model, latest_checkpoint(folder.checkpoints), named, in_stores(self.job))

    def trace(self, folder: RunFolder) -> Trace:
        """The measured trace of the newest session, or of all rounds."""
        return folder.measured()

    def traced(self, folder: RunFolder) -> Traced:
        """Write a trace of all sessions for a viewer. UserError for a run that has none."""
        return trace_sessions(folder, compared)

    def privacy(self, folder: RunFolder) -> PrivacySpent | Guarantee | None:
        """The privacy that the run's messages spent, or that a private job promises; None without noise."""
        return read_spent(folder.path)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that it waits for."""
        return fleet_of(self.job).names

    @property
    def fault_names(self) -> tuple[str, ...]:
        """Names that a fault of its simulation may have: devices, sites, or processes that are executors."""
        return self.devices

    def engine_fleet(self, measure: bool | None) -> Fleet | None:
        """The fleet that names an engine's devices; None where those that join are taken. UserError as of `check`."""
        if not is_known(self.job.fleet, measure):
            return None
        self.check(on_fleet=True)
        return fleet_for(self.job)

    def on_devices(self, devices: Sequence[str], measured: Callable[[Job], Job] | None) -> Job:
        """The job on an engine's devices; `measured` gives it their figures, where no fleet says them."""
        return self.job if measured is None else measured(self.job)

    def submitted(self) -> tuple[str, ...]:
        """Return `devices`. UserError where a coordinator elsewhere could not run it."""
        self.check(on_fleet=True)
        if ":" not in self.job.model.name and self.job.model.name not in model_names():
            raise unknown_name("model", self.job.model.name, model_names())
        refuse_paths(self.job.data)
        return self.devices


def places_of(job: Job, fleet: Fleet | None = None) -> dict[str, ProcessPlace]:
    """Return where device processes of the job's fleet, or of a run's, are on this machine. UserError for an unknown
    device, accelerator or engine."""
    fleet = fleet or fleet_for(job)
    return local_places(job.runtime.device, fleet.names, {d.name: d.engine for d in fleet.devices})


def _other_engines(prepared: Prepared, fleet: Fleet) -> Iterator[str]:
    """A line for each device of another version of torch than this machine's, or that has not all operators."""
    here = engine_operators("torch").torch
    for name, found in prepared.other_engines(fleet).items():
        lacked = ", ".join(found.lacks(prepared.schemas))
        if lacked or found.torch != here:
            has = f"lacks {lacked}, which its stages will not hold" if lacked else "has all operators of the model"
            version = f"torch {sanitize(found.torch)}" + (f" (here {here})" if found.torch != here else "")
            yield f"{name}: engine {found.engine}, {version}: it {has}"


class Start(NamedTuple):
    """Where a run goes on."""

    step: int  # done before
    checkpoint: Path | None
    record: RecoveryRecord | None  # the recovery record of a run at which devices may still be at work
    eval_due: bool = False  # a stop interrupted the evaluation of that step


def start_of(job: Job, choices: Choices, watch: Watch) -> Start | None:
    """Where the run goes on, of pipelines and of replicas. None where nothing is left to do."""
    folder, note = watch.folder, watch.observer.note
    start = _start(job, choices, folder, note) if choices.resume else Start(0, None, None)
    if start.step >= job.training.steps and not start.eval_due:
        note(f"nothing left to do: {folder.path} has {start.step} steps, the job asks for {job.training.steps}")
        return None
    if choices.resume:
        where = "from the start: nothing was saved yet" if start.checkpoint is None else f"after step {start.step}"
        note(f"resuming {folder.path} {where}")
    return start


def _start(job: Job, choices: Choices, folder: RunFolder, note: Callable[[str], None]) -> Start:
    record = _left_in_its_middle(folder, choices)
    checkpoint = newest_whole_checkpoint(folder.checkpoints, note, finite=job.training.non_finite != "ignore")
    step = manifest_of(job, checkpoint).step if checkpoint is not None else 0
    every, steps = job.training.eval_every, job.training.steps
    made = any(point.split == "heldout" and point.step == step for point in folder.losses())
    asked = every > 0 and step > 0 and (step % every == 0 or step == steps)
    return Start(step, checkpoint, record, eval_due=asked and not made and record is None)


class _Planned(NamedTuple):
    prepared: Prepared
    plan: Plan
    fleet: Fleet  # as it was described
    believed: Fleet | None  # with speeds as an earlier session measured them
    holders: DataHolders
    backend: Backend
    weights: Callable[[], FirstWeights] | None  # made while it is planned; None: devices may hold them


def _planned(job: Job, choices: Choices, folder: RunFolder, start: Start, observer: Observer, stop: Stop) -> _Planned:
    fleet = fleet_for(job)
    if choices.plan is not None:
        read_plan(job, fleet, choices.plan)
    backend = choices.backend or LocalBackend(starts_again=True, places=places_of(job))
    holders = DataHolders(
        backend.asks(stop),
        job.used_data,
        constraints_of(job, fleet).data_holders or fleet.names,
        heldout=job.evaluates,
        alike=not job.plan.feeders,
        note=observer.note,
    )
    prepared = _prepared(job, folder, holders, observer, in_its_middle=start.record is not None)
    if start.checkpoint is not None and start.record is None:
        _check_same_job(start.checkpoint, prepared, folder, holders)
    prepared = msgspec.structs.replace(prepared, computes=backend.computes)
    for line in _other_engines(prepared, fleet):
        observer.note(line)
    weights = begin_first_weights(prepared, folder.path) if start.record is None else None
    kept = choices.plan or folder.plan_to_keep(prepared.job, fleet)
    believed = folder.fitted(fleet) if choices.resume else None
    if believed is not None:
        observer.note(f"speeds as measured before: {fitted_text(believed)}")
    planned_on = fleet if believed is None or kept is not None else believed
    if start.record is not None:
        plan = start.record.plan
    else:
        plan = searched(observer, stop, lambda: plan_for(prepared, planned_on, kept))
    prepared = prepared.cut_into(plan.micro_batches)
    observer.planned(plan, planned_on, prepared.captured.train)
    for line in (*protection_text(prepared, plan, planned_on), *prepared.eval_notes):
        observer.note(line)
    observer.note(f"run folder: {folder.path}")
    holders.ask(readers(plan, prepared.captured, evaluates=job.evaluates))
    return _Planned(prepared, plan, fleet, believed, holders, backend, weights)


def _carry_out(planned: _Planned, start: Start, watch: Watch, stop: Stop) -> Outcome:
    prepared, plan, fleet = planned.prepared, planned.plan, planned.fleet
    folder, observer, seen = watch.folder, watch.observer, PipelineWatch(prepared, plan, watch)
    idle = IdleDevices(planned.backend, planned.holders)

    def on_idle_devices(step: int, note: Callable[[str], None], stop: Stop) -> Audited:
        return audit_run(folder.path, step, note=note, stop=stop, idle=idle)

    # Devices with data of their own cannot stand for each other.
    elsewhere = planned.backend.survives_coordinator and not prepared.job.plan.feeders
    share = prepared.job.runtime.audit
    audits = BackgroundAudits(folder.path, share, observer.note, on_idle_devices if elsewhere else None)

    def saved(step: int, directory: Path) -> None:
        watch.saved(step, directory)
        audits.saved(step)

    def begin() -> None:
        _begin_folder(planned, start, folder, observer)
        started = run_started(prepared.job, folder.path, start.step, stop.request)
        watch.began(msgspec.structs.replace(started, plan=plan))

    watcher = Watcher(
        accepted=begin,
        planned=seen.planned,
        period=watch.log.planned,
        advanced=seen.advanced,
        evaluated=seen.evaluated,
        saved=saved,
        rolled_back=seen.rolled_back,
        noted=watch.noted,
        fault=seen.fault,
    )
    stages = sum(len(replica.stages) for replica in plan.replicas)
    observer.began(f"{plan.model} on {plan.fleet}, {stages} stages")
    options = msgspec.structs.replace(_options(planned, start), stop=stop)
    with audits:
        return run_plan(prepared, plan, fleet, folder.path, options, watcher)


def _begin_folder(planned: _Planned, start: Start, folder: RunFolder, observer: Observer) -> None:
    prepared, plan, fleet = planned.prepared, planned.plan, planned.fleet
    # Where devices hold more than the checkpoint, what was lost is not known yet: see Watch.rolled_back.
    kept_until = start.step if start.record is None else prepared.job.training.steps
    folder.begin(prepared.job, fleet, plan, kept_until, observer.note)
    folder.keep_described(planned.holders.described)
    if start.record is not None:  # devices are waiting, and it was all done before
        return
    folder.graph.write_bytes(encode(prepared.captured.train))
    if planned.backend.survives_coordinator:
        keep_prepared(prepared, folder.captured)


def _explain(planned: _Planned, outcome: Outcome, folder: RunFolder, observer: Observer) -> None:
    """Traces, pictures, summary and measured speeds, in the folder."""
    draw_plan(planned.plan, planned.fleet, folder.plan_picture)
    predicted = predict_periods(planned.prepared, outcome.periods)
    measured = Trace(source="runtime", run=folder.path.name, spans=outcome.spans, period=planned.plan.period)
    folder.write_traces(predicted, measured, outcome.periods)
    _report(folder, planned.prepared, (predicted, measured), outcome)
    fitted = fit_fleet(planned.fleet, outcome.periods, measured.spans)
    if fitted is not None:
        folder.keep_fitted(fitted)
        observer.note(f"measured: {fitted_text(fitted)}; isthmus calibrate {folder.path} writes such a fleet")


def _left_in_its_middle(folder: RunFolder, choices: Choices) -> RecoveryRecord | None:
    if choices.backend is None or not choices.devices_stay:
        return None
    record = read_record(folder.path)
    if record is not None:
        choices.backend.expects_reconnect(record.run)
    return record


def _prepared(
    job: Job, folder: RunFolder, holders: DataHolders, observer: Observer, *, in_its_middle: bool
) -> Prepared:
    """The model, captured from what holders say of the data: none are opened here. Devices of a run that was left in
    its middle go on with the graphs that they have."""
    if in_its_middle and (found := kept_prepared(job, folder.captured)) is not None:
        holders.remember(folder.described())
        return found
    holders.ask(job.plan.feeders or None)  # those with data of their own are all needed
    samples = joined_descriptions(holders.described) if job.plan.feeders else agreed(holders.described)
    if job.data.description and (text := difference(described_in(job), samples, counts=True)) is not None:
        raise UserError(f"data.description: {job.data.description}: differs from the devices' data: {text}")
    observer.note(f"capturing {job.model.name} ...")
    return prepare(job, samples)


def _check_same_job(checkpoint: Path, prepared: Prepared, folder: RunFolder, holders: DataHolders) -> None:
    """UserError, before anything is planned, for a checkpoint of another model or of other data."""
    try:
        check_shapes(checkpoint, _trained(prepared))
    except UserError as e:
        before, now = (msgspec.to_builtins(job.model) for job in (folder.job(), prepared.job))
        raise UserError(str(e) if before == now else f"{e}; {next(differences(before, now, 'model'))}") from None
    unchanged(read_manifest(checkpoint).data, holders.digests)


def _trained(prepared: Prepared) -> dict[str, tuple[int, ...]]:
    """The shapes of what training changes and checkpoints always have, by the module's own names."""
    parameters = (op for op in prepared.captured.train.ops if op.kind == "parameter" and any(op.requires_grad))
    return {op.target: op.outputs[0].shape_at(1) for op in parameters}


def _options(planned: _Planned, start: Start) -> RunOptions:
    prepared, backend, holders = planned.prepared, planned.backend, planned.holders
    # The numbers follow from how a batch is cut: that stays as it is.
    kept = msgspec.structs.replace(prepared.job.plan, micro_batches=())
    again = msgspec.structs.replace(prepared, job=msgspec.structs.replace(prepared.job, plan=kept))
    return RunOptions(
        emulate=not backend.survives_coordinator and prepared.job.runtime.emulate,
        resume_from=start.checkpoint,
        store=prepared.job.store.of_devices if prepared.job.store is not None else "",
        eval_due=start.eval_due,
        backend=backend,
        record=start.record,
        begun=planned.weights,
        replan=partial(plan_again, again, backend, holders),
        steady_s=partial(steady_on, again),
        believed=planned.believed,
        holders=holders,
    )


def plan_again(prepared: Prepared, backend: Backend, holders: DataHolders, fleet: Fleet) -> Plan:
    """Return a plan in which those alone read data whose data are known to be the run's. UserError where none can."""
    prepared = msgspec.structs.replace(prepared, computes=backend.computes)
    while True:
        plan = plan_for(prepared, fleet, proving=None)  # devices wait for it
        reading = readers(plan, prepared.cut_into(plan.micro_batches).captured, evaluates=prepared.job.evaluates)
        unknown = [device for device in reading if device not in holders.described]
        left = [name for name in fleet.names if name not in unknown]
        if not unknown:
            return plan
        if not left:
            raise UserError(f"data: of the devices that are left, none has described them: {', '.join(unknown)}")
        fleet = fleet.subset(left)


def _report(folder: RunFolder, prepared: Prepared, traces: tuple[Trace, Trace], outcome: Outcome) -> None:
    (predicted, measured), periods = traces, outcome.periods
    run = Run(folder.path)
    train_points, heldout = finite_points(run.losses), finite_points(run.heldout)
    if any(math.isfinite(loss) for _, loss in (*train_points, *heldout)):
        draw_loss(train_points, heldout, folder.loss_picture, unit=loss_unit(prepared.job, prepared.samples))
    draw_metrics(folder)
    summary, last = run_summary(predicted, measured, periods), last_period(measured, periods)
    if summary is not None and last is not None:
        slow = tuple(late_warnings(outcome.late_s, outcome.elapsed_s))
        summary = msgspec.structs.replace(summary, memory=memory_use(periods[-1].plan, outcome.peaks), too_slow=slow)
        spans = during(predicted, periods, last), during(measured, periods, last)
        draw_timeline(*spans, folder.timeline, notes=slow)
        folder.summary.write_bytes(summary.as_json())
