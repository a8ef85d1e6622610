"""A job file read and checked, and what it asks of a plan on its fleet."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.combinations import refused
from isthmus.cost.compression import ratio_planner_names
from isthmus.documents import beside
from isthmus.engines import check_engine
from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet, changed, in_half, resolve_fleet
from isthmus.job.document import JobReader
from isthmus.job.settings import Job
from isthmus.plans import CHOICES, Constraints, LackingOperators, OwnSamples
from isthmus.training.optim import settings_of
from isthmus.units import parse_duration


def _counted_from(job: Job, folder: str) -> Job:
    """Return the job as a file in this folder says it: with its paths."""
    job = msgspec.structs.replace(job, fleet=beside(job.fleet, folder), data=job.data.counted_from(folder))
    pretrained = job.model.options.get("path")
    if isinstance(pretrained, str):
        options = {**job.model.options, "path": beside(pretrained, folder)}
        job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, options=options))
    return job


def checked(job: Job) -> Job:
    """The job, cut into the first of its numbers of micro-batches, if it says any. UserError for settings that do not
    go together."""
    _check_training(job)
    _check_holders(job)
    job.check_common()
    if job.store is not None and job.privacy is not None:
        raise refused("store", "activation noise", "one")
    if job.schedule not in CHOICES:
        raise UserError(f"schedule: {unknown_name('schedule', job.schedule, CHOICES)}")
    if job.schedule == "delayed":
        _check_delayed(job)
    if job.compression is not None and job.compression.method not in ratio_planner_names():
        raise UserError(f"compression.method: {unknown_name('method', job.compression.method, ratio_planner_names())}")
    if job.runtime.compile and job.runtime.deterministic:
        raise refused("compile", "deterministic", True)
    if job.runtime.changes and not job.runtime.emulate:
        raise refused("changes", "real devices", "some")
    if not 1 <= job.timeout_s < math.inf:
        raise UserError(f"runtime.timeout: got {job.runtime.timeout!r}, expected at least 1 s")
    return job.cut_into(job.plan.micro_batches[0]) if job.plan.micro_batches else job


PIPELINE = JobReader(Job, _counted_from, checked)


def load_job(path: Path, overrides: Mapping[str, object] = {}) -> Job:
    """Return the same as `JobReader.load`."""
    return PIPELINE.load(path, overrides)


def _check_delayed(job: Job) -> None:
    """Two steps are under way at once: what changes how a step computes by what the one before gave cannot be."""
    t = job.training
    if t.leaves_out:
        raise refused("skipped steps", "delayed", "steps that may be left out")
    if job.sync.mode != "every-step":
        raise refused("averaged replicas", "delayed", repr(job.sync.mode))
    if job.plan.feeders:
        raise refused("own data", "delayed", "'own'")
    if job.privacy is not None:
        raise refused("activation noise", "delayed", "noise")


def _check_training(job: Job) -> None:
    t = job.training
    for count in job.counts:
        if t.batch_size % count:
            field = "plan.micro_batches" if job.plan.micro_batches else "training.micro_batches"
            raise UserError(f"training.batch_size: got {t.batch_size}, expected a multiple of {field} ({count})")
    if job.sync.mode != "decoupled" and t.steps % job.sync.every:
        raise UserError(
            f"training.steps: got {t.steps}, expected a multiple of sync.period ({job.sync.every}): replicas are "
            "equal only at the end of a period"
        )
    if not job.optimizer:
        raise UserError("optimizer: got an empty list, expected at least one [[optimizer]]")
    for optimizer in job.optimizer:
        if optimizer.nesterov and not optimizer.momentum:
            raise UserError("optimizer.nesterov: got true without momentum, expected momentum above 0")
        settings_of(optimizer, job.learning_rate.tabled(t.steps), t.steps)


def _check_holders(job: Job) -> None:
    plan, feeders = job.plan, job.plan.feeders
    if plan.labels_stay and not plan.holders:
        raise UserError("plan.labels_stay: got true, expected a plan.data_holder where the labels stay")
    if job.privacy is not None and not plan.holders:
        raise UserError("privacy.activations: got noise, expected a plan.data_holder whose data it is to protect")
    if "" in plan.holders:
        raise UserError("plan.data_holder: got an empty name, expected a device or a region")
    if plan.holders_data == "own" and not feeders:
        raise UserError("plan.holders_data: got 'own' without a plan.data_holder, expected one")
    if len(set(feeders)) < len(feeders):
        raise UserError(f"plan.data_holder: got {', '.join(feeders)}, expected each device once")
    if job.data.description and feeders:
        raise refused("a description", "own data", repr(job.data.description))
    for name in job.data.of:
        if name not in feeders:
            whose = ", ".join(feeders) or "none without plan.holders_data = 'own'"
            raise UserError(f"data.of: {name!r} is not among the holders with data of their own: {whose}")


def fleet_of(job: Job) -> Fleet:
    """UserError for a fleet that is not there, or lacks a device that is to change or a data holder."""
    fleet = resolve_fleet(job.fleet)
    fleet = fleet.thin(job.devices) if job.devices is not None else fleet
    fleet = in_half(fleet) if job.training.precision != "fp32" else fleet
    fleet = _with_engines(fleet, job.runtime.engine)
    for number, change in enumerate(job.runtime.changes):
        try:
            changed(fleet, [change], change.step)
        except UserError as e:
            raise UserError(f"runtime.changes[{number}]: {e}") from None
    for name in job.plan.holders:
        try:
            fleet.located(name)
        except UserError as e:
            thinned = f", of which {job.devices} devices are left," if job.devices is not None else ""
            raise UserError(f"plan.data_holder: fleet {fleet.name!r}{thinned}: {e}") from None
    return fleet


def _with_engines(fleet: Fleet, chosen: str | Mapping[str, str]) -> Fleet:
    """Return the fleet with engines by `[runtime] engine`. UserError for a device or an engine that does not exist."""
    field = "runtime.engine" if isinstance(chosen, str) else "runtime.engine.{}"
    by_device = dict.fromkeys(fleet.names, chosen) if isinstance(chosen, str) else chosen
    for device in by_device:
        if device not in fleet.names:
            raise UserError(f"runtime.engine: {unknown_name('device', device, fleet.names)}")
    engines = {device: check_engine(field.format(device), name) for device, name in by_device.items()}
    devices = (msgspec.structs.replace(d, engine=engines.get(d.name, d.engine)) for d in fleet.devices)
    return msgspec.structs.replace(fleet, devices=tuple(devices)) if engines else fleet


def constraints_of(
    job: Job,
    fleet: Fleet,
    own_samples: Mapping[str, OwnSamples] = {},
    lacking: Sequence[LackingOperators] = (),
) -> Constraints:
    """The constraints that the job sets on a plan for this fleet, which may have lost devices. `own_samples` are the
    samples of holders with data of their own, once known. Raises UserError if no data holder is left, or if a holder
    with data of its own is missing."""
    found: list[str] = []
    for name in job.plan.holders:
        with contextlib.suppress(UserError):
            found += fleet.located(name)
    if job.plan.holders and not found:
        raise UserError(f"plan.data_holder: none of the data holders is there: {', '.join(job.plan.holders)}")
    feeders = job.plan.feeders
    for name in feeders:
        if name not in fleet.names:
            region = any(device.region == name for device in fleet.devices)
            what = f"got region {name!r}, expected devices" if region else f"device {name!r} is not there"
            raise UserError(f"plan.data_holder: {what}: each has data of its own")
    holders = feeders or tuple(name for name in fleet.names if name in found)
    return Constraints(
        objective=job.plan.objective,
        data_holders=holders,
        own_samples=tuple(own_samples[name] for name in feeders) if own_samples else (),
        labels_stay=job.plan.labels_stay,
        max_step_s=parse_duration(job.plan.max_step, "plan.max_step") if job.plan.max_step else None,
        max_price=job.plan.max_price,
        compression=job.compression,
        memory_headroom=job.plan.memory_headroom,
        lacking=tuple(lacking),
    )
