"""A job on a cluster's engine: a coordinator here, an agent on each node, the run, and nothing left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack, cast

import msgspec

from isthmus.api.folder import PROBED, RunFolder
from isthmus.api.given import check_arguments
from isthmus.api.job_overrides import any_job_of
from isthmus.api.notebook import default_observer
from isthmus.api.observer import Observer
from isthmus.api.run import Run
from isthmus.api.run_job import program_of, run_job
from isthmus.api.run_session import ATTACHED, PYTHON_AGAIN, Attached, Choices, attached_to, folder_of, given_callbacks
from isthmus.api.serving_fleet import UpChoices, agent_names, agent_specs, check_devices, fleet_on, serving_towards
from isthmus.api.states import timeout_s
from isthmus.atomic_write import atomic_write
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.fleet import Fleet, dump_fleet, load_fleet
from isthmus.job import Job, prepare
from isthmus.runtime.coordinator.data_holders import DataHolders, agreed
from isthmus.runtime.launchers.launcher import Renders, open_launcher
from isthmus.runtime.launchers.local import fork_agents_early as fork_agents_early
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_probe import probe_fleet, speed_question


def run_on_engine(job: Job | FederatedJob, asked: UpChoices, observer: Observer, stop: Stop) -> Run:
    """Run a job as `run_job` or `run_simulated` do, on the engine's nodes. Whatever ends the run ends the agents
    too."""
    stop.check()
    timeout_s(asked.timeout)
    launcher = open_launcher(asked.engine, asked.options)
    program = program_of(job)
    fleet = program.engine_fleet(asked.measure)
    launcher.check()
    here = None if launcher.head or job.data is None else Path(job.data.folder)
    specs = agent_specs(agent_names(asked, fleet, launcher.nodes()), asked, fleet, here)
    serving = serving_towards(launcher.head, asked.timeout, asked.host, asked.port, asked.addresses)
    folder = folder_of(job, Choices(resume=asked.resume, run=asked.run), observer.note)
    try:
        with fleet_on(folder, launcher, specs, serving, observer, stop, verbose=asked.verbose) as (service, devices):
            if fleet is not None:
                check_devices(devices, fleet)
            measured = partial(_on_measured, devices, folder, service, observer.note, stop)
            job = program.on_devices(devices, measured if fleet is None else None)
            choices = Choices(
                resume=asked.resume,
                run=folder.path,
                backend=service,
                devices_stay=False,
                again=asked.again or PYTHON_AGAIN,
                callbacks=asked.callbacks,
            )
            return run_job(job, choices, observer, stop)
    except KeyboardInterrupt:
        if not folder.begun:
            (folder.path / PROBED).unlink(missing_ok=True)
        raise
    finally:
        folder.leave()


def rendered(job: Job | FederatedJob, asked: UpChoices) -> str:
    """Return the engine's file, without tickets. Nothing is started or asked for. UserError for an engine that is
    handed nothing to show."""
    launcher = open_launcher(asked.engine, asked.options)
    if not isinstance(launcher, Renders):
        raise UserError(f"--dry-run: --on {asked.engine} is handed no file; slurm, kubernetes and skypilot are")
    fleet = program_of(job).engine_fleet(asked.measure)
    specs = agent_specs(agent_names(asked, fleet, None), asked, fleet)
    return launcher.render(specs, Path(job.run_dir).absolute())


def _on_measured(
    devices: Sequence[str],
    folder: RunFolder,
    service: FleetCoordinator,
    note: Callable[[str], None],
    stop: Stop,
    job: Job,
) -> Job:
    """The job on these devices, as they are measured; or as they were, in a run that goes on."""
    path = folder.path / PROBED
    if not (path.is_file() and set(load_fleet(path).names) == set(devices)):
        atomic_write(path, dump_fleet(_measured(job, devices, service, note, stop)).encode())
        note(f"wrote {path}: with --fleet {path} the next run need not measure")
    return msgspec.structs.replace(job, fleet=str(path), devices=None)


def _measured(
    job: Job, devices: Sequence[str], service: FleetCoordinator, note: Callable[[str], None], stop: Stop
) -> Fleet:
    """In the first layers of the job's model, which is captured with what a device says of the data."""
    holders = DataHolders(service.asks(stop), job.used_data, devices, heldout=job.evaluates, note=note)
    holders.ask()
    question = speed_question(prepare(job, agreed(holders.described)))
    return probe_fleet(service, devices, note, question, f"measured by isthmus up for {job.name}")


class _OnEngine(TypedDict, total=False):
    nodes: int  # number of nodes, by default all that the engine has, or as many as the job's fleet file names
    devices_per_node: str
    """`auto`: each accelerator is a device, a machine without one too; a number of accelerators; `island`: those of a
    node are one device, under torchrun."""
    options: Mapping[str, object]  # options of the engine
    host: str  # address to listen on; by default this machine's on the route to the engine, loopback for `local`
    port: int  # the port, by default any that is free
    addresses: tuple[str, ...]  # HOST or HOST:PORT by which nodes reach the coordinator; by default `host`
    timeout: str  # silence after which a device is lost; by default "60 s"
    data: Path  # folder with the data, on every node
    memory: str  # the part of each device's memory that the job may take, as "4 GiB"; by default all
    measure: bool  # whether the devices that join are measured; by default unless the job names a fleet file


class HowUp(_OnEngine, Attached, total=False):
    """How a job runs on an engine; its callbacks and trackers."""


def up(
    job: Job | FederatedJob | str | Path,
    on: str,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    **given: Unpack[HowUp],
) -> Run:
    """Train a job on the nodes of a cluster, by its engine, as `local`. Simulated clients of a federated job are shared
    out among the nodes.

    Starts a coordinator here and an agent on each node, trains, and ends them, also where the run fails. `resume`,
    `run`, `overrides`, `observer`, `stop`, `callbacks`, `track`, `metrics` and `quiet` are as of `isthmus.train`.

    UserError for what is wrong with the job, the engine or the address; PeerError where agents end before they have
    joined, or devices were lost and the run could not go on.

    >>> run = isthmus.up("job.toml", on="local", nodes=3)  # doctest: +SKIP
    """
    check_arguments(up, HowUp, given)
    how = cast("_OnEngine", {name: value for name, value in given.items() if name not in ATTACHED})
    asked = UpChoices(engine=on, resume=resume, run=None if run is None else Path(run), **how)
    asked = msgspec.structs.replace(asked, callbacks=given_callbacks(given))
    observer = observer or default_observer(quiet=given.get("quiet", False))
    return run_on_engine(attached_to(any_job_of(job, overrides), given), asked, observer, stop or Stop())
