"""A training run: plan, run, watch, compare, and leave a folder that explains it all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from isthmus.api.callbacks import callbacks_of
from isthmus.api.folder import RunFolder
from isthmus.api.make_plan import fleet_for, plan_for, predict_periods
from isthmus.api.observer import Observer
from isthmus.api.page import page_beside
from isthmus.api.run import Run, finite_points, loss_unit
from isthmus.api.search import searched
from isthmus.api.stored_run import Uploads, chosen_folder, uploaded
from isthmus.api.watch import Watch
from isthmus.callbacks import Callback, Callbacks, RunEnded, RunStarted
from isthmus.data.description import difference, joined_descriptions
from isthmus.errors import Interrupted, UserError
from isthmus.fleet import Fleet
from isthmus.graph import encode
from isthmus.job import Job, Prepared, constraints_of, described_in, keep_prepared, kept_prepared, prepare
from isthmus.plans import Plan
from isthmus.protocol.drift import fit_fleet
from isthmus.report import draw_loss, draw_plan, draw_timeline, during, last_period, memory_use, run_summary
from isthmus.report.fleet_tables import fitted_text
from isthmus.runtime.coordinator.activation_privacy import protection_text
from isthmus.runtime.coordinator.backend import Backend, LocalBackend, local_places
from isthmus.runtime.coordinator.data_holders import DataHolders, agreed
from isthmus.runtime.coordinator.recovery_record import RecoveryRecord, read_record
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, run_plan
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.coordinator.stages import readers
from isthmus.runtime.processes.signals import Stop
from isthmus.trace import Trace
from isthmus.training.checkpoint import newest_whole_checkpoint, read_manifest
from isthmus.units import format_duration


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """How the job is run."""

    resume: bool = False
    run: Path | None = None
    plan: Path | None = None
    """A plan document to follow."""
    backend: Backend | None = None
    """Devices of a fleet, at their own speed; None: a process for each device here, emulated as the job says."""
    devices_stay: bool = True
    """Whether devices of a run that was left in its middle may be at work still."""
    again: str = "--resume"
    """What a person has to say for the run to go on."""
    callbacks: tuple[Callback, ...] = ()
    """Besides the job's."""
    dashboard: bool = False
    """Whether the run is shown in a browser."""


def run_job(job: Job, choices: Choices, observer: Observer, stop: Stop) -> Run:
    """To its end, or to a good end once it is to stop: then what is leased is finished, and a checkpoint saved. Raises
    Interrupted where it ended at once: before it began, or by a second Ctrl-C."""
    stop.check()
    folder = run_folder(job, choices, observer.note)
    folder.check_kind(federated=False)
    with folder.claimed(), page_beside(folder.path if choices.dashboard else None, observer.note):
        try:
            callbacks = callbacks_of(job, choices.callbacks, observer.note)
            with (
                callbacks.session(folder.path),
                uploaded(job.store, folder, choices.again, observer.note, resume=choices.resume) as uploads,
            ):
                return _run(job, choices, folder, uploads, observer, stop, callbacks)
        except KeyboardInterrupt:  # a second Ctrl-C, or one before the run began
            how = f"resume with {choices.again}, run folder {folder.path}" if folder.begun else "nothing was written"
            raise Interrupted(f"interrupted at once: {how}", folder.path if folder.begun else None) from None


def _run(
    job: Job,
    choices: Choices,
    folder: RunFolder,
    uploads: Uploads,
    observer: Observer,
    stop: Stop,
    callbacks: Callbacks,
) -> Run:
    record = _left_in_its_middle(folder, choices)
    finite = job.training.non_finite != "ignore"
    checkpoint = newest_whole_checkpoint(folder.checkpoints, observer.note, finite=finite) if choices.resume else None
    start_step = read_manifest(checkpoint).step if checkpoint is not None else 0
    if start_step >= job.training.steps:
        observer.note(
            f"nothing left to do: {folder.path} has {start_step} steps, the job asks for {job.training.steps}"
        )
        return Run(folder.path)
    if choices.resume:
        where = f"after step {start_step}" if checkpoint is not None else "from the start: nothing was saved yet"
        observer.note(f"resuming {folder.path} {where}")
    fleet = fleet_for(job)
    backend = choices.backend or LocalBackend(starts_again=True, places=local_places(job.runtime.device, fleet.names))
    holders = DataHolders(
        backend.asks(stop),
        job.data,
        constraints_of(job, fleet).data_holders or fleet.names,
        heldout=job.evaluates,
        alike=not job.plan.feeders,
        note=observer.note,
    )
    prepared = _prepared(job, folder, holders, observer, in_its_middle=record is not None)
    kept = choices.plan or folder.plan_to_keep(job, fleet)
    believed = folder.fitted(fleet) if choices.resume else None
    if believed is not None:
        observer.note(f"speeds as measured before: {fitted_text(believed)}")
    planned_on = fleet if believed is None or kept is not None else believed
    plan = record.plan if record is not None else searched(observer, stop, lambda: plan_for(prepared, planned_on, kept))
    prepared = prepared.cut_into(plan.micro_batches)
    observer.planned(plan, planned_on, prepared.captured.train)
    for line in protection_text(prepared, plan, planned_on):
        observer.note(line)
    observer.note(f"run folder: {folder.path}")
    holders.ask(readers(plan, prepared.captured, evaluates=job.evaluates))

    def begin() -> None:
        # Where devices hold more than the checkpoint, what was lost is not known yet: see Watch.rolled_back.
        start = start_step if record is None else job.training.steps
        folder.begin(prepared.job, fleet, plan, start, observer.note)
        folder.keep_described(holders.described)
        if record is None:  # else devices are waiting, and it was all done before
            folder.graph.write_bytes(encode(prepared.captured.train))
            if choices.backend is not None:
                keep_prepared(prepared, folder.captured)
            draw_plan(plan, fleet, folder.plan_picture)
        watch.began(start_step)
        callbacks.start(
            RunStarted(
                run=folder.path,
                kind="pipeline",
                steps=job.training.steps,
                first_step=start_step,
                settings=msgspec.to_builtins(prepared.job),
                plan=plan,
                pictures={"plan": folder.plan_picture} if folder.plan_picture.is_file() else {},
                stop=stop.request,
            )
        )

    watch = Watch(prepared, plan, folder, observer, callbacks, uploads)
    observer.began(plan)
    try:
        outcome = run_plan(
            prepared,
            plan,
            fleet,
            folder.path,
            msgspec.structs.replace(_options(prepared, backend, holders, checkpoint, record, believed), stop=stop),
            Watcher(
                accepted=begin,
                planned=watch.planned,
                period=watch.log.planned,
                advanced=watch.advanced,
                saved=watch.saved,
                rolled_back=watch.rolled_back,
                noted=watch.noted,
                decided=watch.decided,
            ),
        )
    finally:
        observer.ended()
    if record is not None:
        draw_plan(plan, fleet, folder.plan_picture)
    predicted = predict_periods(prepared, outcome.periods)
    measured = Trace(source="runtime", run=folder.path.name, spans=outcome.spans, period=plan.period)
    folder.write_traces(predicted, measured, outcome.periods)
    reason = "" if outcome.outcome in ("done", "interrupted") else outcome.reason
    watch.log.ended(outcome.outcome, reason)
    _report(folder, prepared, (predicted, measured), outcome)
    run = Run(folder.path, outcome.outcome)
    observer.reported(run)
    fitted = fit_fleet(fleet, outcome.periods, measured.spans)
    if fitted is not None:
        folder.keep_fitted(fitted)
        observer.note(f"measured: {fitted_text(fitted)}; isthmus calibrate {folder.path} writes such a fleet")
    _warn_late(observer, outcome)
    callbacks.end(RunEnded(run=folder.path, outcome=outcome.outcome, reason=reason, pictures=run.pictures))
    check_outcome(outcome)
    if outcome.outcome == "interrupted":
        observer.note(f"interrupted: resume with {choices.again}, run folder {folder.path}")
    return run


def _left_in_its_middle(folder: RunFolder, choices: Choices) -> RecoveryRecord | None:
    """What is known of a run that devices may be at work for still."""
    if not choices.resume or choices.backend is None or not choices.devices_stay:
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


def _options(
    prepared: Prepared,
    backend: Backend,
    holders: DataHolders,
    checkpoint: Path | None,
    record: RecoveryRecord | None,
    believed: Fleet | None,
) -> RunOptions:
    # The numbers follow from how a batch is cut: that stays as it is.
    kept = msgspec.structs.replace(prepared.job.plan, micro_batches=())
    again = msgspec.structs.replace(prepared, job=msgspec.structs.replace(prepared.job, plan=kept))
    replan = partial(_plan_again, again, holders)
    return RunOptions(
        emulate=not backend.survives_coordinator and prepared.job.runtime.emulate,
        resume_from=checkpoint,
        backend=backend,
        record=record,
        replan=replan,
        believed=believed,
        holders=holders,
    )


def _plan_again(prepared: Prepared, holders: DataHolders, fleet: Fleet) -> Plan:
    """In which those alone read data whose data are known to be the run's. UserError where that cannot be."""
    while True:
        plan = plan_for(prepared, fleet)
        reading = readers(plan, prepared.cut_into(plan.micro_batches).captured, evaluates=prepared.job.evaluates)
        unknown = [device for device in reading if device not in holders.described]
        left = [name for name in fleet.names if name not in unknown]
        if not unknown:
            return plan
        if not left:
            raise UserError(f"data: of the devices that are left, none has described them: {', '.join(unknown)}")
        fleet = fleet.subset(left)


def run_folder(job: Job, choices: Choices, note: Callable[[str], None]) -> RunFolder:
    """Of the run to resume, or a new one. UserError."""
    return chosen_folder(
        Path(job.run_dir), job.name, resume=choices.resume, run=choices.run, store=job.store, note=note
    )


def _report(folder: RunFolder, prepared: Prepared, traces: tuple[Trace, Trace], outcome: Outcome) -> None:
    """Pictures and the summary."""
    (predicted, measured), periods = traces, outcome.periods
    run = Run(folder.path)
    train_points, heldout = finite_points(run.losses), finite_points(run.heldout)
    if any(math.isfinite(loss) for _, loss in (*train_points, *heldout)):
        draw_loss(train_points, heldout, folder.loss_picture, unit=loss_unit(prepared.job, prepared.samples))
    summary, last = run_summary(predicted, measured, periods), last_period(measured, periods)
    if summary is not None and last is not None:
        summary = msgspec.structs.replace(summary, memory=memory_use(periods[-1].plan, outcome.peaks))
        draw_timeline(during(predicted, periods, last), during(measured, periods, last), folder.timeline)
        folder.summary.write_bytes(summary.as_json())


def _warn_late(observer: Observer, outcome: Outcome) -> None:
    """Emulation is honest only while the host computes faster than the devices that it plays."""
    for device, late_s in outcome.late_s.items():
        if late_s > 0.02 * outcome.elapsed_s:
            overrun = f"{format_duration(late_s)} of {format_duration(outcome.elapsed_s)}"
            observer.note(
                f"warning: this host could not keep up with emulated device {device}: its tasklets overran by "
                f"{overrun}; use slower devices or fewer of them",
            )
