"""Executors on a Ray cluster: agents that the engine `ray` starts for one run of a federated job."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from isthmus.api.engine_fleet import fleet_on, serving_towards
from isthmus.api.folder import RunFolder
from isthmus.api.observer import Observer
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.runtime.launchers.launcher import AgentSpec
from isthmus.runtime.launchers.ray import RayLauncher, RayOptions
from isthmus.runtime.launchers.ray_connection import RayUser
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator

USER = RayUser("runtime.backend", "runtime.ray.address")


@contextlib.contextmanager
def executors_on_ray(
    job: FederatedJob, folder: RunFolder, observer: Observer, stop: Stop
) -> Generator[tuple[FleetCoordinator, int]]:
    """A fleet of the job's executors, and how many they are: as many as the cluster has room for, where the job says 0.
    They read the job's data from the paths of this machine. UserError where Ray is missing, too old or cannot be
    reached, or has no room."""
    options = job.runtime.ray
    launcher = RayLauncher(RayOptions(address=options.address, cpus=options.cpus, gpus=options.gpus), USER)
    launcher.check()
    try:
        specs = _executors(job, launcher.nodes())
        serving = serving_towards(launcher.head, job.runtime.timeout)
        with fleet_on(folder, launcher, specs, serving, observer, stop) as (service, devices):
            yield service, len(devices)
    finally:
        launcher.stop()


def _executors(job: FederatedJob, room: int) -> list[AgentSpec]:
    share = f"cpus = {job.runtime.ray.cpus:g}, gpus = {job.runtime.ray.gpus:g}"
    if not room:
        raise UserError(f"runtime.ray: got {share} for each executor: no node of the cluster has them")
    if (count := job.runtime.executors or room) > room:
        raise UserError(
            f"runtime.executors: got {count}, expected at most {room}: so many with {share} each fit on the Ray cluster"
        )
    data = Path("" if job.data is None else job.data.folder).absolute()
    (device,) = job.devices
    arguments = ("--one-owner", "--timeout", job.runtime.timeout, "--data", str(data), "--device", device)
    return [AgentSpec(name=f"executor-{number}", arguments=arguments, ticket="") for number in range(count)]
