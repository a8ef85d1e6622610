"""The program of federated rounds in a run: clients on executors, or at sites."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from isthmus import api
from isthmus.api.engine_fleet import fleet_on, serving_towards
from isthmus.api.folder import RunFolder
from isthmus.api.forecast import Forecast, Simulating
from isthmus.api.observer import Observer
from isthmus.api.run_session import Choices, run_started
from isthmus.api.stored_run import RoundUploads
from isthmus.api.traces import Traced
from isthmus.api.up_choices import is_known
from isthmus.api.watch import Ran, Watch
from isthmus.callbacks import Evaluated, RunFault, StepDone
from isthmus.combinations import refused
from isthmus.data.registry import refuse_paths
from isthmus.disclosure import PrivacySpent
from isthmus.documents import numbered
from isthmus.errors import PeerError, UserError
from isthmus.federated.accounting import written_guarantee
from isthmus.federated.admission import Guarantee
from isthmus.federated.buffers import buffers_of
from isthmus.federated.evaluation import Evaluation, RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob, build, check_deployment, check_simulation
from isthmus.federated.resident import Resident
from isthmus.federated.server import Commits
from isthmus.fleet import Fleet, resolve_fleet
from isthmus.job import Job
from isthmus.models.registry import WithLoss
from isthmus.programs.merging import Why
from isthmus.programs.open_phase import refusal_texts
from isthmus.report.federated_trace import trace_of
from isthmus.run_files import ROUND_LINES, ROUNDS, keep_stop
from isthmus.runtime.federated.fleet_executors import check_on_devices, on_devices
from isthmus.runtime.federated.run import FederatedRun, process_names
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.launchers.launcher import AgentSpec
from isthmus.runtime.launchers.ray import RayLauncher, RayOptions
from isthmus.runtime.launchers.ray_connection import RayUser
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.trace import Trace, write_perfetto


def write_federated_trace(folder: RunFolder) -> tuple[list[RoundLine], list[str]]:
    """Its rounds for a trace viewer; the rounds, and what could not be read."""
    notes: list[str] = []
    lines = RoundHistory.of(folder.path).lines(notes.append)
    kept = Commits(folder.path / ROUNDS).rounds()
    if not lines:
        raise _no_lines(folder, kept)
    reported_of = {line.record.round for line in lines}
    if missing := [
        number + 1 for number in range(max(kept, *(n + 1 for n in reported_of))) if number not in reported_of
    ]:
        unreported = numbered("round", missing)
        notes.append(f"run folder {folder.path}: {ROUND_LINES} tells nothing of {unreported}: not in the trace")
    write_perfetto([trace_of(folder.path.name, lines)], folder.perfetto)
    return lines, notes


def trained_model(
    folder: RunFolder, job: FederatedJob, note: Callable[[str], None] = lambda _: None
) -> tuple[nn.Module, int]:
    """The server's model after the last committed round that is whole, and how many rounds that is."""
    damaged: list[str] = []
    found = Commits(folder.path / ROUNDS).newest(damaged.append, needs_states=False)
    if found is None:
        raise _nothing_saved(folder, job)
    for why in damaged:
        note(f"{why}; going back to round {found.round + 1}")
    resident = Resident(build(job))
    model = found.values.get("model")
    if model is None or model.shape != (resident.size,) or model.dtype != resident.dtype:
        raise UserError(f"run folder {folder.path}: its rounds hold a model of another form than that of job.json")
    parameters = dict(resident.module.named_parameters())
    with torch.no_grad():  # each in memory of its own, as files hold them
        for name, value in resident.named(model).items():
            parameters[name].copy_(value)
    resident.set_buffers(buffers_of(found.values))
    return resident.module, found.round + 1


def _no_lines(folder: RunFolder, kept: int) -> UserError:
    """The error of a trace without lines of rounds, though rounds may have been made."""
    path = folder.path / ROUND_LINES
    if path.is_file() and path.stat().st_size:
        return UserError(f"{path}: damaged: none of its lines can be read")
    if kept:
        state = "empty" if path.is_file() else "missing"
        return UserError(
            f"{path}: {state}, expected a line for each of {kept} rounds, of which the last are in {ROUNDS}/"
        )
    return UserError(f"run folder {folder.path}: no round was committed yet")


def _nothing_saved(folder: RunFolder, job: FederatedJob) -> UserError:
    """The error of an export without a file of a round."""
    unread: list[str] = []
    lines, save_every = RoundHistory.of(folder.path).lines(unread.append), job.training.save_every
    done = max((line.record.round + 1 for line in lines), default=0)
    if done >= min(save_every, job.federated.rounds):
        what = f"{ROUNDS}/ holds no round, expected the last of the {done} that {ROUND_LINES} lists"
    elif done:
        what = f"no round was saved yet: training.save_every is {save_every}, and {done} were made"
    elif unread:
        what = f"{ROUNDS}/ holds no round, and no line of {ROUND_LINES} can be read"
    else:
        what = "no round was committed yet"
    return UserError(f"run folder {folder.path}: {what}")


USER = RayUser("runtime.backend", "runtime.ray.address")


class Rounds(NamedTuple):
    """A federated job as its program."""

    job: FederatedJob

    def check(self, *, on_fleet: bool, plan: Path | None = None) -> None:
        if plan is not None:
            raise refused("options of plans", "federated", str(plan), "plan")
        if on_fleet and self.job.has_sites:
            check_deployment(self.job)
            return
        check_simulation(self.job)
        if on_fleet and self.job.data is not None:
            refuse_paths(self.job.data)
        if on_fleet or self.job.runtime.backend == "ray":
            check_on_devices(self.job)

    def run(self, choices: Choices, watch: Watch, stop: Stop) -> Ran | None:
        job = self.job
        if job.runtime.backend == "ray" and choices.backend is None:
            with executors_on_ray(job, watch.folder, watch.observer, stop) as (fleet, count):
                there = msgspec.structs.replace(choices, backend=fleet, devices_stay=False)
                return Rounds(on_devices(job, count)).run(there, watch, stop)
        folder, observer, seen = watch.folder.path, watch.observer, RoundsWatch(job, watch, stop)
        observer.began(f"{job.federated.algorithm}, {job.federated.rounds} rounds")

        def began() -> None:
            seen.began(run.store.first_round)

        service = choices.backend
        if job.has_sites and isinstance(service, FleetCoordinator):
            run = SiteRun(job, folder, resume=choices.resume, began=began, watch=seen.round_done)
            where = f"sites {', '.join(run.deployment.sites)}"
        else:
            if service is not None:
                job = on_devices(job, max(1, job.runtime.executors))
            run = FederatedRun(job, folder, resume=choices.resume, began=began, watch=seen.round_done, backend=service)
            if job.has_sites:
                observer.note(
                    "the job's sites take no part: their clients are simulated here; `isthmus serve` trains at sites"
                )
            if run.state_form is not None:
                seen.keeps_states(run.state_form.size_bytes)
            count = len(run.machine.executors)
            several = f"{count} executor{'s' if count > 1 else ''}" if service is None else "devices of the fleet"
            where = f"{len(run.data.sizes)} clients, {several}, scheme {job.runtime.scheme}"
        if run.store.first_round >= job.federated.rounds:
            asked = f"the job asks for {job.federated.rounds}"
            observer.note(f"nothing left to do: {folder} has {run.store.first_round} rounds, {asked}")
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
        return Ran(finish.outcome, finish.reason, explain=lambda: _draw(run.store.history.lines(), folder))

    def simulated(self, how: Simulating, observer: Observer, stop: Stop) -> Forecast:
        return api.federated_simulation.simulate_rounds(self.job, how.faults)

    def rehearsed(self, observer: Observer, stop: Stop) -> Forecast | None:
        return Rounds(self.job.altered(deployment=None)).simulated(Simulating(), observer, stop)

    def trained(self, folder: RunFolder, note: Callable[[str], None] = lambda _: None) -> tuple[nn.Module, int]:
        return trained_model(folder, self.job, note)

    def load(self, folder: RunFolder, model: nn.Module) -> int:
        found, done = self.trained(folder)
        module = found.model if isinstance(found, WithLoss) and not isinstance(model, WithLoss) else found
        model.load_state_dict(module.state_dict())
        return done

    def trace(self, folder: RunFolder) -> Trace:
        return trace_of(folder.path.name, RoundHistory.of(folder.path).lines())

    def traced(self, folder: RunFolder) -> Traced:
        return Traced(folder.perfetto, *write_federated_trace(folder))

    def privacy(self, folder: RunFolder) -> PrivacySpent | Guarantee | None:
        return written_guarantee(folder.path)

    @property
    def devices(self) -> tuple[str, ...]:
        return ()

    @property
    def fault_names(self) -> tuple[str, ...]:
        return api.federated_simulation.executor_names(self.job)

    def engine_fleet(self, measure: bool | None) -> Fleet | None:
        if self.job.has_sites:
            raise refused("sites", "isthmus up", "sites")
        if measure:
            raise refused("options of plans", "federated", "true", "measure")
        self.check(on_fleet=True)
        return resolve_fleet(self.job.fleet) if is_known(self.job.fleet, None) else None

    def on_devices(self, devices: Sequence[str], measured: Callable[[Job], Job] | None) -> FederatedJob:
        return on_devices(self.job, len(devices))

    def submitted(self) -> tuple[str, ...]:
        self.check(on_fleet=True)
        return self.devices


def _draw(lines: list[RoundLine], folder: Path) -> None:
    if not lines:
        return
    pictures = importlib.import_module("isthmus.report.federated_pictures")  # with matplotlib, for half a second
    evaluated = [(line.record.round + 1, line.evaluation) for line in lines if line.evaluation is not None]
    pictures.draw_evaluations(evaluated, folder / "metrics.png")
    pictures.draw_round_timeline(lines[-1], folder / "round.png")
    pictures.draw_throughput(lines, folder / "paces.png")


class RoundsWatch:
    """`noted` and `round_done` may be called by two threads."""

    def __init__(self, job: FederatedJob, watch: Watch, stop: Stop) -> None:
        self._job, self._watch, self._stop = job, watch, stop
        self._uploads = RoundUploads(watch.uploads, watch.folder.path)

    def began(self, first_round: int) -> None:
        watch, folder = self._watch, self._watch.folder
        if first_round:
            watch.observer.note(f"resuming {folder.path} after {first_round} rounds")
        watch.observer.note(f"run folder: {folder.path}")
        keep_stop(folder.path, "")
        folder.forget_losses(first_round)
        watch.began(run_started(self._job, folder.path, first_round, self._stop.request))

    def keeps_states(self, size_bytes: int) -> None:
        self._uploads.keeps_states(size_bytes)

    def ended(self) -> None:
        self._uploads.look(self.noted, last=True)

    def noted(self, text: str) -> None:
        self._watch.noted(text)
        self._watch.callbacks.fault(RunFault(step=self._watch.done, kind="note", text=text))

    def round_done(self, line: RoundLine) -> None:
        self._uploads.look(self.noted)
        for update in line.record.refused:
            device, step = f"client {update.client}", line.record.round + 1
            fault = RunFault(step=step, kind="refused", device=device, text=update.reason)
            self._watch.callbacks.fault(fault)
        self._watch.stepped(round_step(line, self._job.federated.rounds))
        if line.evaluation is not None:
            self._watch.evaluated(round_evaluation(line.record.round + 1, line.evaluation))


def round_evaluation(done: int, found: Evaluation) -> Evaluated:
    """Return the evaluation after so many rounds as an event."""
    means = {name: figures.mean for name, figures in found.clients.items()}
    return Evaluated(step=done, loss=found.loss, unit="round", metrics=found.metrics, clients=means)


ENDED: Mapping[Why, str] = {  # why a round ended, where not all have answered
    "quorum": "ended with the share that must answer",
    "behind": "ended without those still at work for an earlier round",
    "deadline": "ended by the deadline",
}


def _text(line: RoundLine) -> str:
    """Return why it ended, and why the first update was refused."""
    ended = ENDED.get(line.record.closed_by)
    refused = [f"{text:.100}" for text in refusal_texts(line.record.refused)[:1]]
    return ", ".join([*([f"{ended} ({line.rules})"] if ended else []), *refused])


def round_step(line: RoundLine, rounds: int) -> StepDone:
    """Return a round of `rounds` as the event of a step."""
    record, seconds, busy = line.record, line.seconds, line.busy_s()
    samples = sum(timed.samples for one in record.trained.values() for timed in one)
    return StepDone(
        step=record.round + 1,
        steps=rounds,
        unit="round",
        clients=line.clients,
        refused=len(record.refused),
        late=len(record.stale),
        missing=len(record.missing),
        reassigned=record.stolen,
        step_s=seconds,
        longest_s=line.makespan_s,
        planned_s=record.predicted_s,
        samples_per_s=samples / seconds if seconds else None,
        sent_bytes=line.sent_bytes + line.received_bytes,
        busy={name: min(1.0, busy_s / seconds) for name, busy_s in busy.items()} if seconds else {},
        devices=tuple(busy),
        text=_text(line),
        round=record,
    )


@contextlib.contextmanager
def executors_on_ray(
    job: FederatedJob, folder: RunFolder, observer: Observer, stop: Stop
) -> Generator[tuple[FleetCoordinator, int]]:
    """A fleet of the job's executors on a Ray cluster, which are agents that the engine `ray` starts, and how many they
    are: as many as the cluster has room for, where the job says 0. They read the job's data from the paths of this
    machine. UserError where Ray is missing, too old or cannot be reached, or has no room."""
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
    return [AgentSpec(name=name, arguments=arguments, ticket="") for name in process_names(count)]
