"""A run of replicas that never wait, in a folder that explains it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from isthmus.api.folder import FLEET, RunFolder
from isthmus.api.losses import LossPoint
from isthmus.api.observer import Observer
from isthmus.api.run import Run
from isthmus.api.run_session import RunChoices, run_session
from isthmus.callbacks import StepDone
from isthmus.cost import PlanLayout, SyncPolicy, build_replicas
from isthmus.data import load_dataset
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, fleet_of, prepare
from isthmus.protocol.decoupled_events import MergeChanges, StepsMade
from isthmus.run_files import JOB, write_json
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.record import MergeLine, merges_file
from isthmus.runtime.decoupled.run import DecoupledOutcome, DecoupledRun, check_decoupled
from isthmus.runtime.decoupled.trainer import heldout_loss
from isthmus.runtime.processes.signals import Stop
from isthmus.training.checkpoint import CheckpointWriter, Manifest
from isthmus.units import format_duration, format_size


def run_decoupled(job: Job, choices: RunChoices, observer: Observer, stop: Stop) -> Run:
    """To its end, or until it is to stop: then what replicas have is merged and saved. UserError for a job that cannot
    be run like this, PeerError where no replica was left."""
    stop.check()
    fleet = fleet_of(job)
    check_decoupled(job, fleet)
    if choices.resume:
        raise UserError("--resume: got a job with sync.mode 'decoupled', expected a new run: replicas are not saved")
    with run_session(job, choices, observer) as session:
        folder = session.folder
        with DecoupledRun(job, fleet, folder.path) as run:
            step_s = step_times(prepare(job), fleet)
            watch = _Watch(job, fleet, run, folder, observer)
            observer.note(f"run folder: {folder.path}")
            for name, seconds in step_s.items():
                observer.note(f"{name}: {job.training.batch_size // len(step_s)} samples in {format_duration(seconds)}")
            outcome = run.run(step_s if job.runtime.emulate else {}, watch.callbacks, stop)
            watch.end(outcome)
        if outcome.finish.outcome == "lost":
            raise PeerError(outcome.finish.reason)
        return Run(folder.path, outcome=outcome.finish.outcome)


def step_times(prepared: Prepared, fleet: Fleet) -> dict[str, float]:
    """By device, how long a step of its replica takes, as the cost model says. UserError for a device that cannot hold
    the model."""
    count = len(fleet.names)
    samples = prepared.job.training.batch_size // count
    if samples % prepared.job.micro_batch_size:
        raise UserError(
            f"training.micro_batches: got {prepared.job.training.micro_batches} with {count} replicas of {samples} "
            f"samples a step, expected a multiple of {count}"
        )
    alone = msgspec.structs.replace(prepared.job, sync=SyncPolicy())
    problem = msgspec.structs.replace(prepared, job=alone).problem(fleet)
    micro_batches = samples // prepared.job.micro_batch_size
    problem = problem.cut_into(micro_batches)
    found: dict[str, float] = {}
    for name in fleet.names:
        plan = build_replicas(problem, [PlanLayout((name,), (), micro_batches)], planner="decoupled")
        found[name] = plan.predicted.step_s
    return found


class _Watch:
    """Writes down what happens."""

    def __init__(self, job: Job, fleet: Fleet, run: DecoupledRun, folder: RunFolder, observer: Observer) -> None:
        self._job, self._run, self._folder, self._observer = job, run, folder, observer
        self._merges = merges_file(folder.path)
        self._heldout = load_dataset(job.data, "heldout") if job.evaluates else None
        self._step = self._evaluated = 0
        self._losses: list[float] = []
        self.callbacks = MergerWatch(stepped=self._stepped, merged=self._merged, note=observer.note)
        write_json(folder.path / FLEET, fleet)
        write_json(folder.path / JOB, job)

    def _stepped(self, replica: str, made: StepsMade, samples: int, seconds: float) -> None:
        training = self._job.training
        self._losses.append(math.nan if made.loss is None else made.loss)
        step = min(samples // training.batch_size, training.steps)
        if step > self._step:
            loss = sum(self._losses) / len(self._losses)
            known = loss if math.isfinite(loss) else None
            self._step, self._losses = step, []
            self._folder.log(LossPoint(step=step, loss=known))
            self._observer.stepped(StepDone(step=step, steps=training.steps, loss=known))

    def _merged(self, merge: MergeChanges, seconds: float) -> None:
        self._merges.add(MergeLine(seconds=seconds, merge=merge))
        every = self._job.training.eval_every
        step = merge.samples // self._job.training.batch_size
        if self._heldout is not None and step // every > self._evaluated // every:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        assert self._heldout is not None, "evaluated where the job says so"
        self._evaluated = step
        training = self._job.training
        self._run.fill()
        loss = heldout_loss(self._run.model, self._heldout, training.eval_samples, training.batch_size)
        self._folder.log(LossPoint(step=step, loss=loss if math.isfinite(loss) else None, split="heldout"))
        self._observer.evaluated(step, loss)

    def end(self, outcome: DecoupledOutcome) -> None:
        """Save the merged model, and say what it took."""
        training = self._job.training
        step = min(outcome.samples // training.batch_size, training.steps)
        self._run.fill()
        if self._heldout is not None and self._evaluated < step:
            self._evaluate(step)
        weights = dict(self._run.model.named_parameters()) | dict(self._run.model.named_buffers())
        writer = CheckpointWriter(self._folder.checkpoints)
        writer.write(step, "merged", weights)
        saved: Path = writer.commit(
            Manifest(step=step, seed=training.seed, batch=training.batch_size, shuffle=training.shuffle)
        )
        self._observer.saved(step, saved)
        self._observer.ended()
        self._observer.note(
            f"{outcome.samples} samples in {format_duration(outcome.seconds)}; {outcome.merges} merges, "
            f"{outcome.late} contributions too late; {format_size(outcome.received_bytes)} of changes received, "
            f"{format_size(outcome.sent_bytes)} of fragments sent"
        )
