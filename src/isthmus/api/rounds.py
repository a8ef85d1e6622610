"""The program of federated rounds: its runs, of clients on executors or at sites; and its simulation, the coordinator
and executors of a run on a virtual clock.

What clients and rounds take in a simulation is measured on this machine, by a few rounds of the job itself; how
executors differ is the job's emulation. Of a job with a fleet nothing is measured: times are those of the fleet's
devices and links. All other rounds are not trained, so a population of a million is a matter of seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from rich.console import RenderableType
from torch import nn

from isthmus.api.folder import RunFolder
from isthmus.api.forecast import Forecast, Simulating, StruckRun
from isthmus.api.make_plan import plan_for, steady_on
from isthmus.api.observer import Observer
from isthmus.api.run import Traced
from isthmus.api.run_session import Choices, run_started
from isthmus.api.serving_fleet import fleet_on, is_known, serving_towards
from isthmus.api.stored_run import RoundUploads
from isthmus.api.watch import Ran, Watch
from isthmus.callbacks import Evaluated, RunFault, StepDone
from isthmus.combinations import refused
from isthmus.data.clients import ClientData
from isthmus.data.description import DataDescription
from isthmus.data.registry import refuse_paths
from isthmus.disclosure import PrivacySpent
from isthmus.documents import numbered
from isthmus.errors import PeerError, UserError
from isthmus.federated.accounting import written_guarantee
from isthmus.federated.admission import Guarantee
from isthmus.federated.algorithms import AlgorithmSpec, load_algorithm
from isthmus.federated.client_costs import ClientCosts
from isthmus.federated.cohorts import Cohorts
from isthmus.federated.emulated_speed import ExecutorFleet, transfer_s
from isthmus.federated.evaluation import Evaluation, RoundHistory, RoundLine
from isthmus.federated.job import (
    Deployment,
    FederatedJob,
    build,
    check_deployment,
    check_simulation,
    client_data,
    emulation,
    executors,
    promised,
)
from isthmus.federated.local import StepsByRound
from isthmus.federated.pipeline import Segment, check_descends
from isthmus.federated.resident import Resident, buffers_of
from isthmus.federated.server import Commits
from isthmus.fleet import Fleet, resolve_fleet
from isthmus.job import Job
from isthmus.models.registry import WithLoss
from isthmus.programs.merging import Why
from isthmus.programs.open_phase import refusal_texts
from isthmus.programs.rounds import Rounds as RoundsPolicy
from isthmus.protocol.federated_messages import NONE, LinearFit, PhaseId
from isthmus.protocol.federated_participation import Participation
from isthmus.report.rounds_table import simulated_table, trace_of
from isthmus.run_files import ROUND_LINES, ROUNDS, keep_stop
from isthmus.runtime.federated.executor import check_on_devices, on_devices
from isthmus.runtime.federated.run import FederatedRun, coordinator_of, process_names
from isthmus.runtime.federated.site_run import SiteRun, site_coordinator
from isthmus.runtime.federated.site_runner import PipelinePlans
from isthmus.runtime.federated.trainer import counted_costs, with_executors
from isthmus.runtime.launchers.launcher import AgentSpec
from isthmus.runtime.launchers.ray import RayLauncher, RayOptions
from isthmus.runtime.launchers.ray_connection import RayUser
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.sanitize import sanitize
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import (
    FederatedCosts,
    MessageCosts,
    SimulatedFederation,
    SimulatedRound,
    check_round_faults,
    simulate_federation,
)
from isthmus.trace import Trace, write_perfetto
from isthmus.units import format_duration


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
        return simulate_rounds(self.job, how.faults)

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
        return executor_names(self.job)

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
    pictures = importlib.import_module("isthmus.report.timeline")  # with matplotlib, for half a second
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


MOST_ROUNDS, FEWEST_ROUNDS = 30, 3
MOST_S = 3.0  # measured no longer, once it has the fewest rounds
CLIENTS_EACH = 5  # clients of an executor in a round that is measured


class SimulatedExecutor(msgspec.Struct, frozen=True, kw_only=True):
    """An executor on a device of the job's fleet."""

    device: str
    seconds_per_sample: float  # in all epochs of the first pass
    broadcast_s: float  # with the link's latency, as the next
    sums_s: float


class SimulatedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A site that is a fleet."""

    site: str
    devices: tuple[str, ...]  # with a stage
    step_s: float  # as planned
    round_s: float  # seconds of all local steps


class SimulatedRounds(StruckRun, frozen=True, kw_only=True):
    run: SimulatedFederation
    executors: int
    line: LinearFit  # seconds of a client as measured here, or the mean over the fleet's devices
    overhead_s: float  # seconds of a round as measured here; 0 with a fleet
    fleet: str = ""  # as the job names it; empty where times were measured here
    devices: tuple[SimulatedExecutor, ...] = ()  # with a fleet: of every executor
    pipelines: tuple[SimulatedPipeline, ...] = ()  # pipelines of sites that are fleets

    privacy: Guarantee | None = None  # the guarantee of a run of all rounds; None without privacy

    @property
    def rounds(self) -> Sequence[SimulatedRound]:
        return self.run.rounds

    def notes(self) -> Iterable[tuple[float, str]]:
        return self.run.notes

    def table(self) -> RenderableType:
        return simulated_table(self.rounds, self.line, self.fleet)

    def lines(self) -> list[str]:
        found = [
            f"{sanitize(one.site)}: a pipeline over {len(one.devices)} devices, {format_duration(one.step_s)} a step, "
            f"{format_duration(one.round_s)} a round"
            for one in self.pipelines
        ]
        found += [] if self.privacy is None else [f"privacy: {self.privacy}"]
        if not self.faults:
            return found
        hourly = f": {3600 * len(self.rounds) / self.run.seconds:.3g} rounds/h" if self.run.seconds else ""
        done = f"{len(self.rounds)} rounds in {format_duration(self.run.seconds)}{hourly}"
        return [*found, *self.struck_lines(), self.concluded(done)]

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = {
            "rounds": len(self.rounds),
            "executors": self.executors,
            "seconds_per_sample": self.line.seconds_per_sample,
            "fixed_s": self.line.fixed_s,
            "overhead_s": self.overhead_s,
            "round_s": statistics.median(r.seconds for r in self.rounds) if self.rounds else None,
            "total_s": sum(r.seconds for r in self.rounds),
            "closed_by": dict(Counter(r.record.closed_by for r in self.rounds)),
            "late_updates": sum(len(r.record.stale) for r in self.rounds),
            "clients_missing": sum(len(r.record.missing) for r in self.rounds),
        }
        if self.faults:
            found |= self.ended()
        if self.privacy is not None:
            found["privacy"] = msgspec.to_builtins(self.privacy)
        if self.pipelines:
            found["pipelines"] = msgspec.to_builtins(self.pipelines)
        return found | ({"fleet": self.fleet, "devices": msgspec.to_builtins(self.devices)} if self.fleet else {})


def simulate_rounds(
    job: FederatedJob, faults: Sequence[Fault] = (), counted: ClientCosts | None = None
) -> SimulatedRounds:
    """Simulate the run: over the sites of the job's deployment, if it has one, else over executors.

    Times are the fleet's, if the job has one; else a few rounds are measured here. `counted` are a client's costs on
    the fleet where they are known already: of this model, algorithm and local training.
    UserError for faults that no executor or site can have, PeerError where the run cannot go on.
    """
    if job.scheme.per == "population" and not job.fleet:
        raise refused("an executor for each client", "simulation", repr(job.runtime.scheme))
    check_simulation(job)
    found = _simulated(job, data := client_data(job), faults, counted)
    return msgspec.structs.replace(found, privacy=promised(job, len(data.sizes)))


def _simulated(
    job: FederatedJob, data: ClientData, faults: Sequence[Fault], counted: ClientCosts | None
) -> SimulatedRounds:
    if job.federated.deployment is not None:
        _check_sites(job.federated.deployment, len(data.sizes))
        deployment = job.federated.deployment
        make = _after_saved(job, lambda first: site_coordinator(job, deployment, data.sizes.copy(), first, None))
        sites = tuple(data.sizes.tolist())
        pipelines = tuple(_pipeline(job, deployment, name, data) for name in deployment.fleets)
    else:
        job, sites, pipelines = with_executors(job, data), (), ()
        fleet = job.executor_fleet(executors(job, len(data.sizes)))
        if fleet is not None:
            return _on_fleet(job, data, fleet, faults, counted or counted_costs(job, data))
        cohorts = Cohorts(job, data.sizes)
        make = _after_saved(job, lambda first: coordinator_of(job, data.sizes, cohorts, first, None))
    names = make(0).executors
    check_round_faults(faults, names, sites=bool(sites))
    found = measured(job)
    costs = FederatedCosts(
        lines=tuple(_line(found.line, name, pipelines) for name in names),
        sums_s=found.overhead_s,
        noise=job.runtime.noise,
        clients_per_vmap=found.clients_per_vmap,
        factor=_factor(job, 0 if sites else len(names)),
        sites=sites,
    )
    run, undisturbed_s = simulate_struck(make, costs, faults, job.training.seed)
    return SimulatedRounds(
        run=run,
        faults=tuple(faults),
        undisturbed_s=undisturbed_s,
        executors=len(names),
        line=found.line,
        overhead_s=found.overhead_s,
        pipelines=pipelines,
    )


def executor_names(job: FederatedJob) -> tuple[str, ...]:
    """Return the names of those that train in a simulation of the job: its sites, the devices of its fleet that are
    executors, or processes of this machine. UserError as of `simulate_rounds`."""
    if job.federated.deployment is not None:
        return job.federated.deployment.sites
    job = with_executors(job, data := client_data(job))
    count = executors(job, len(data.sizes))
    fleet = job.executor_fleet(count)
    return tuple(process_names(count) if fleet is None else fleet.names)


def _after_saved(job: FederatedJob, make: Callable[[int], RoundsPolicy]) -> Callable[[int], RoundsPolicy]:
    """Return what makes the coordinator that begins after so many rounds, as the newest of them that is saved."""
    return lambda done: make(done // job.training.save_every * job.training.save_every)


def _pipeline(job: FederatedJob, deployment: Deployment, site: str, data: ClientData) -> SimulatedPipeline:
    """Simulate a site that is a fleet, with the samples of its client. UserError as `PipelinePlans`."""
    assert job.data is not None, "its clients were looked at"
    check_descends(load_algorithm(AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options)))
    samples = DataDescription(columns=dict(data.columns), train=int(data.sizes[deployment.sites.index(site)]))
    steps = StepsByRound(job.local.tabled(job.federated.rounds), job.federated.rounds)
    plans = PipelinePlans(deployment.fleets[site], job.model, job.data, samples, job.local, steps, plan_for)

    def steps_s(segment: Segment) -> float:
        return segment.steps * steady_on(plans.prepared(segment), plans.plan(segment), plans.fleet)

    step_s = plans.first.predicted.expected_s
    return SimulatedPipeline(
        site=site, devices=plans.first.used, step_s=step_s, round_s=sum(map(steps_s, plans.segments))
    )


def _line(measured: LinearFit, name: str, pipelines: Sequence[SimulatedPipeline]) -> LinearFit:
    """Return the times of an executor. A site that is a fleet has one client, whose samples are known."""
    round_s = next((one.round_s for one in pipelines if one.site == name), None)
    return measured if round_s is None else LinearFit(0.0, round_s)


def _factor(job: FederatedJob, count: int) -> Callable[[int, PhaseId], float]:
    """Return how much slower each of the executors is than its line says; sites are not emulated."""
    emulated = [emulation(job, k) for k in range(count)]
    return lambda k, phase: emulated[k].factor(phase.round) if emulated else 1.0


def _on_fleet(
    job: FederatedJob, data: ClientData, fleet: ExecutorFleet, faults: Sequence[Fault], counted: ClientCosts
) -> SimulatedRounds:
    """Nothing is measured. Client states move over the link between two executors; the coordinator's own work, and
    what a device does besides products and convolutions, take no time."""
    fleet.check_memory(counted.memory_bytes)

    def coordinator(first: int) -> RoundsPolicy:
        states = np.full(len(data.sizes), NONE, dtype=np.int32) if counted.state_bytes else None
        return coordinator_of(job, data.sizes, Cohorts(job, data.sizes), first, states)

    make = _after_saved(job, coordinator)
    names = make(0).executors
    check_round_faults(faults, names, sites=False)
    count = len(names)
    lines = tuple(LinearFit(counted.passes[0].flops / fleet.flops_per_s(k), 0.0) for k in range(count))
    share = [one.flops / counted.passes[0].flops for one in counted.passes]
    slower = _factor(job, count)
    costs = FederatedCosts(
        lines=lines,
        noise=job.runtime.noise,
        clients_per_vmap=job.runtime.clients_per_vmap or 1,
        factor=lambda k, phase: slower(k, phase) * share[phase.number],
        used=job.local.used,
        messages=tuple(message_costs(fleet, k, counted) for k in range(count)),
        moves_s=None if not counted.state_bytes else lambda a, b: fleet.between_s(a, b, counted.state_bytes),
    )
    run, undisturbed_s = simulate_struck(make, costs, faults, job.training.seed)
    devices = tuple(
        SimulatedExecutor(
            device=name,
            seconds_per_sample=line.seconds_per_sample,
            broadcast_s=message.to_s + message.broadcast_s[0],
            sums_s=message.from_s + message.sums_s[0],
        )
        for name, line, message in zip(names, lines, costs.messages, strict=True)
    )
    mean = LinearFit(statistics.fmean(line.seconds_per_sample for line in lines), 0.0)
    return SimulatedRounds(
        run=run,
        faults=tuple(faults),
        undisturbed_s=undisturbed_s,
        executors=count,
        line=mean,
        overhead_s=0.0,
        fleet=job.fleet,
        devices=devices,
    )


def message_costs(fleet: ExecutorFleet, executor: int, counted: ClientCosts) -> MessageCosts:
    """Return the costs of one executor's messages, over the links between its device and the coordinator."""
    incoming, outgoing = fleet.incoming(executor), fleet.outgoing(executor)
    to_s, from_s = transfer_s(incoming, 0), transfer_s(outgoing, 0)
    return MessageCosts(
        to_s=to_s,
        from_s=from_s,
        broadcast_s=tuple(transfer_s(incoming, one.broadcast_bytes) - to_s for one in counted.passes),
        sums_s=tuple(transfer_s(outgoing, one.sums_bytes) - from_s for one in counted.passes),
        collected_s=tuple(transfer_s(outgoing, one.collected_bytes) - from_s for one in counted.passes),
    )


def _check_sites(deployment: Deployment, clients: int) -> None:
    if len(deployment.sites) != clients:
        raise UserError(
            f"federated.deployment.sites: got {len(deployment.sites)} sites for data of {clients} clients, expected "
            "as many: each site is simulated with one client's samples; where the data say who has which, "
            f"federated.partition.clients = {len(deployment.sites)} gives each site several of them"
        )


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a few rounds on this machine."""

    line: LinearFit  # seconds of a client, wherever it trained
    overhead_s: float  # seconds of a phase: broadcast, sums, the server's step
    clients_per_vmap: int  # clients that were trained as one


class _EnoughError(Exception):
    """So much was measured."""


def measured(job: FederatedJob) -> MeasuredRun:
    """Run the first rounds of the job for a few seconds, with small cohorts and without its emulation: with its scheme,
    its threads and its number of clients together, on the cores that the executors share, as the run will."""
    lines: list[RoundLine] = []
    until_s = float("inf")

    def watch(line: RoundLine) -> None:
        nonlocal until_s
        lines.append(line)
        until_s = min(until_s, time.monotonic() + MOST_S)  # from the first one's end on
        if len(lines) >= FEWEST_ROUNDS and time.monotonic() > until_s:
            raise _EnoughError

    with tempfile.TemporaryDirectory() as folder:
        run = FederatedRun(_short(job), Path(folder), resume=False, watch=watch)
        with contextlib.suppress(_EnoughError):
            run.run()
    steady = lines[1:] or lines  # the first one meets cold caches
    points = [(t.samples, t.seconds) for line in steady for timed in line.record.trained.values() for t in timed]
    if not points:
        refused = [r.reason for line in lines for r in line.record.refused]
        raise UserError(f"a client cannot be measured: {'; '.join(refused[:1]) or 'none took part'}")
    spent = [line.seconds - max(line.busy_s().values(), default=0.0) for line in steady]
    passes = len(job.algorithm(len(run.data.sizes)).passes)
    return MeasuredRun(
        line=_fitted(points),
        overhead_s=max(0.0, statistics.fmean(spent)) / passes,
        clients_per_vmap=run.job.runtime.clients_per_vmap,
    )


def _short(job: FederatedJob) -> FederatedJob:
    """Some rounds of it, of a few clients for each executor, on this machine as it is."""
    rules = job.federated.participation
    population = len(client_data(job).sizes)
    count = executors(job, population)
    clients = max(CLIENTS_EACH, 2 * job.runtime.clients_per_vmap) * count if job.scheme.per == "given" else count
    clients = min(max(clients, rules.minimum), rules.needed(population))
    runtime = msgspec.structs.replace(job.runtime, slow_down=(), unstable=False, noise=0.0)
    few = Participation(clients=clients, minimum=rules.minimum, weighted=rules.weighted, select=rules.select)
    rounds = min(MOST_ROUNDS, job.federated.rounds)
    return msgspec.structs.replace(job, runtime=runtime).altered(rounds=rounds, participation=few)


def _fitted(points: Sequence[tuple[int, float]]) -> LinearFit:
    """Fit by least squares. Times are positive, and so is the time of each sample."""
    samples, seconds = np.array(points, dtype=np.float64).T
    spread = samples - samples.mean()
    per_sample = float(spread @ seconds / (spread @ spread)) if spread.any() else 0.0
    per_sample = min(max(per_sample, 0.0), float(seconds.mean() / samples.mean()))
    return LinearFit(per_sample, float(seconds.mean() - per_sample * samples.mean()))


def simulate_struck(
    make: Callable[[int], RoundsPolicy], costs: FederatedCosts, faults: Sequence[Fault], seed: int
) -> tuple[SimulatedFederation, float | None]:
    """The run with these faults, and the seconds of all rounds without; None where they cannot be finished without them
    either. `make`: as `simulate_federation`.

    PeerError for a run that cannot go on though nothing strikes it."""
    run = simulate_federation(make, costs, seed, faults)
    if not faults and run.finish.outcome == "lost":
        raise PeerError(run.finish.reason)
    undisturbed_s: float | None = run.seconds
    if faults:
        other = simulate_federation(make, costs, seed)
        undisturbed_s = None if other.finish.outcome == "lost" else other.seconds
    return run, undisturbed_s
