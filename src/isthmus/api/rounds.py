"""The program of federated rounds in a run: clients on executors, or at sites."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec

from isthmus.api.ray_executors import executors_on_ray
from isthmus.api.rounds_watch import RoundsWatch
from isthmus.api.run_session import Choices
from isthmus.api.watch import Ran, Watch
from isthmus.data.allowed import refuse_paths
from isthmus.errors import PeerError
from isthmus.federated.history import RoundLine
from isthmus.federated.job import FederatedJob, check_deployment, check_simulation
from isthmus.runtime.federated.fleet_executors import check_on_devices, on_devices
from isthmus.runtime.federated.run import FederatedRun
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator


def check_rounds(job: FederatedJob, *, on_fleet: bool) -> None:
    """UserError for a job that cannot be run like this."""
    if on_fleet and job.federated.deployment is not None:
        check_deployment(job)
        return
    check_simulation(job)
    if on_fleet and job.data is not None:
        refuse_paths(job.data)
    if on_fleet or job.runtime.backend == "ray":
        check_on_devices(job)


def run_rounds(job: FederatedJob, choices: Choices, watch: Watch, stop: Stop) -> Ran | None:
    """To the last round. None where none is left to do."""
    if job.runtime.backend == "ray" and choices.backend is None:
        with executors_on_ray(job, watch.folder, watch.observer, stop) as (fleet, count):
            there = msgspec.structs.replace(choices, backend=fleet, devices_stay=False)
            return run_rounds(on_devices(job, count), there, watch, stop)
    folder, observer, seen = watch.folder.path, watch.observer, RoundsWatch(job, watch, stop)
    observer.began(f"{job.federated.algorithm}, {job.federated.rounds} rounds")

    def began() -> None:
        seen.began(run.first_round)

    service = choices.backend
    if job.federated.deployment is not None and isinstance(service, FleetCoordinator):
        run = SiteRun(job, folder, resume=choices.resume, began=began, watch=seen.round_done)
        where = f"sites {', '.join(run.deployment.sites)}"
    else:
        if service is not None:
            job = on_devices(job, max(1, job.runtime.executors))
        run = FederatedRun(job, folder, resume=choices.resume, began=began, watch=seen.round_done, backend=service)
        if run.state_form is not None:
            seen.keeps_states(run.state_form.size_bytes)
        count = len(run.machine.executors)
        several = f"{count} executor{'s' if count > 1 else ''}" if service is None else "devices of the fleet"
        where = f"{len(run.data.sizes)} clients, {several}, scheme {job.runtime.scheme}"
    if run.first_round >= job.federated.rounds:
        asked = f"the job asks for {job.federated.rounds}"
        observer.note(f"nothing left to do: {folder} has {run.first_round} rounds, {asked}")
        return None
    observer.note(f"{job.federated.algorithm} over {where}; a round ends with {run.machine.rules.description}")
    try:
        if isinstance(run, SiteRun):
            assert isinstance(service, FleetCoordinator)
            finish = run.run(service, seen.noted, stop)
        else:
            finish = run.run(seen.noted, stop)
        seen.ended()
    except PeerError as e:
        raise PeerError(f"{e}; {choices.going_on(folder)}") from e
    return Ran(finish.outcome, finish.reason, explain=lambda: _draw(run.history.lines(), folder))


def _draw(lines: list[RoundLine], folder: Path) -> None:
    if not lines:
        return
    pictures = importlib.import_module("isthmus.report.federated_pictures")  # with matplotlib, for half a second
    evaluated = [(line.record.round + 1, line.evaluation) for line in lines if line.evaluation is not None]
    pictures.draw_evaluations(evaluated, folder / "metrics.png")
    pictures.draw_round_timeline(lines[-1], folder / "round.png")
    pictures.draw_throughput(lines, folder / "paces.png")
