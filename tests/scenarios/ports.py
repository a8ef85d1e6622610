"""One scenario, played by the simulator and by real processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan, run_spec
from isthmus.fleet import Fleet, FleetChange
from isthmus.graph import cuts
from isthmus.job import Job, PlanConfig, Prepared, prepare
from isthmus.plans import Plan
from isthmus.plans.plan import device_of
from isthmus.protocol import Item, StateLayout
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.run_ports import PlanRequest
from isthmus.runtime.coordinator.backend import DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.coordinator.plans import Plans
from isthmus.runtime.coordinator.recovery_record import read_record
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.simulator import Fault, RecoveryTimes, SimulationOptions
from isthmus.simulator.run import RunSimulation
from isthmus.trace import Span
from isthmus.training.checkpoint import CheckpointWriter
from tests.faults.forwarder import ADDRESS, Forwarder, free_port
from tests.programs.ports import Asked
from tests.runtime.commands import devices_of
from tests.runtime.jobs import DIGITS, fleet_of, job_of

from .crew import Crash, Crew
from .decisions import Decisions, observed_by

Port = Literal["simulated", "real"]
TIMEOUT_S = 4.0
"""A busy machine may keep a process from saying anything for seconds."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What happens, to which run."""

    devices: int = 2
    """In the first plan."""
    spares: int = 0
    stages: int = 2
    """Of a plan, at most."""
    steps: int = 12
    save_every: int = 4
    strikes: Fault | None = None
    """When all devices have done the step `at`; its time counts for nothing."""
    at: int = 6
    labels_stay: bool = False
    """The first device has the data: it runs the first stage and the last one, and another device those between."""
    schedule: str = "1f1b"
    flops_per_s: float = 2e7
    snapshots: bool = False
    """Whether a neighbour has a copy of each stage's state in its memory, as by default in a run."""
    settles_at_a_step: bool = True
    """Whether the steps at which epochs begin follow from the scenario, and not from time."""


def job_for(scenario: Scenario) -> Job:
    made = job_of("mlp", {"layers": 4}, DIGITS, steps=scenario.steps, save_every=scenario.save_every)
    settings: dict[str, object] = {
        "emulate": True,
        "timeout": f"{TIMEOUT_S} s",
        "lease_ahead": 1,
        "snapshots": scenario.snapshots,
        "snapshot_every": 1,
        "adapt": False,
    }
    if scenario.strikes is not None and scenario.strikes.kind == "slow":
        change = FleetChange(step=scenario.at, factor=1 / scenario.strikes.factor, device=scenario.strikes.device)
        settings |= {"changes": (msgspec.to_builtins(change),), "adapt": True}
    made = msgspec.structs.replace(
        made, schedule=scenario.schedule, runtime=msgspec.convert(settings, type(made.runtime))
    )
    if scenario.labels_stay:
        made = msgspec.structs.replace(made, plan=PlanConfig(data_holder=("d0",), labels_stay=True))
    return made


@functools.cache
def _captured(labels_stay: bool) -> Prepared:
    return prepare(job_for(Scenario(labels_stay=labels_stay)))


def planned(scenario: Scenario, prepared: Prepared, fleet: Fleet) -> Plan:
    """Equal parts of the model on the first devices that there are, slow ones last."""
    problem = prepared.problem(fleet)
    fastest = max(device.sustained_flops_per_s for device in fleet.devices)
    names = sorted(fleet.names, key=lambda name: fleet.device(name).sustained_flops_per_s < fastest / 3)
    positions = [cut.position for cut in cuts(problem.flow)]
    if scenario.labels_stay:
        other = next(name for name in names if name != "d0")
        boundaries = [positions[len(positions) // 3], problem.last_start or positions[-1]]
        return build_plan(problem, ["d0", other, "d0"], boundaries, planner="test")
    count = min(scenario.stages, len(names))
    boundaries = [positions[len(positions) * k // count] for k in range(1, count)]
    return build_plan(problem, names[:count], boundaries, planner="test")


def play(port: Port, scenario: Scenario, folder: Path) -> str:
    """The decisions of its whole run, a line each."""
    prepared = msgspec.structs.replace(_captured(scenario.labels_stay), job=job_for(scenario))
    fleet = fleet_of(scenario.devices + scenario.spares, scenario.flops_per_s)
    decisions = Decisions(steps=scenario.settles_at_a_step)
    first = planned(scenario, prepared, fleet.subset(fleet.names[: scenario.devices]))
    away = scenario.strikes is not None and scenario.strikes.kind == "coordinator"
    playing = _simulate if port == "simulated" else _run_twice if away else _run
    playing(scenario, prepared, fleet, first, decisions, folder)
    return decisions.text()


# The simulator


class _Planner:
    def __init__(self, plans: Plans) -> None:
        self._plans = plans

    def adaptation(self) -> Adaptation:
        return self._plans.adaptation()

    def make(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures]:
        return self._plans.make(request)

    def begin(self, layout: StateLayout) -> None:
        self._plans.begin(layout)

    def eval_edges(self, plan: Plan) -> None:
        return None


def _simulate(
    scenario: Scenario, prepared: Prepared, fleet: Fleet, first: Plan, decisions: Decisions, folder: Path
) -> None:
    plans = Plans(prepared, first, fleet, functools.partial(planned, scenario, prepared), emulate=False)
    spares = tuple(Fault(kind="join", device=name, time_s=0.0) for name in fleet.names[scenario.devices :])
    options = SimulationOptions(
        control_latency_s=0.001,
        faults=spares,
        recovery=RecoveryTimes(plan_s=0.05, process_s=1.0, stage_s=0.05, timeout_s=TIMEOUT_S),
    )
    struck: list[int] = []

    def advanced(run: RunSimulation, item: Item) -> None:
        if scenario.strikes is not None and item.kind == "train" and item.step == scenario.at and not struck:
            struck.append(item.step)
            run.strikes.strike(scenario.strikes)

    def decided(name: str, device: str, asked: Sequence[Asked]) -> None:
        decisions.observe(name, device, asked)
        for name in _evicted(scenario, asked):
            run.world.later(0.0, "evicted", functools.partial(run.strikes.strike, Fault(device=name, time_s=0.0)))

    planner, layout = _Planner(plans), plans.now.layout
    with observed_by(decided):
        run = RunSimulation(
            first, fleet, run_spec(prepared), options, planner=planner, layout=layout, advanced=advanced
        )
        run.run()


def _evicted(scenario: Scenario, asked: Sequence[Asked]) -> list[str]:
    """Devices that would come back sooner or later, where a link is cut: their processes end, so that time decides
    nothing."""
    cut = scenario.strikes is not None and scenario.strikes.kind == "link"
    return [str(call[1]) for call in asked if call[0] == "reject_device"] if cut else []


# Real processes


class _Asked:
    """A session in which somebody is asked to leave."""

    def __init__(self, session: DevicesAtWork, leaving: set[str]) -> None:
        self._session = session
        self._leaving = leaving

    def leaving(self) -> Collection[str]:
        found = frozenset(self._leaving)
        self._leaving.clear()
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


class _Backend(LocalBackend, frozen=True, kw_only=True):
    leaving: set[str]

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        with LocalBackend.at_work(self, call, acceptor) as session:
            yield _Asked(session, self.leaving)  # pyright: ignore[reportReturnType]


def _run(scenario: Scenario, prepared: Prepared, fleet: Fleet, first: Plan, decisions: Decisions, folder: Path) -> None:
    with contextlib.ExitStack() as there:
        places, forwarder = dict[str, ProcessPlace](), None
        if scenario.strikes is not None and scenario.strikes.kind == "link":
            forwarder = Forwarder(port := free_port())
            there.callback(forwarder.close)
            places = {scenario.strikes.other: ProcessPlace(port=port, address=ADDRESS)}
        backend = _Backend(places=places, leaving=set())
        struck, stopped = list[int](), list[int]()

        def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
            if scenario.strikes is not None and item.kind == "train" and item.step == scenario.at and not struck:
                struck.append(item.step)
                _strike(scenario.strikes, forwarder, backend, stopped)
            if item.kind == "train" and item.step == scenario.steps - 1:
                for pid in stopped:  # it is out of the run, and the end would wait for it
                    os.kill(pid, signal.SIGKILL)

        def decided(name: str, device: str, asked: Sequence[Asked]) -> None:
            decisions.observe(name, device, asked)
            for name in _evicted(scenario, asked):
                os.kill(_pid_of(name), signal.SIGKILL)

        replan = functools.partial(planned, scenario, prepared)
        options = RunOptions(backend=backend, replan=replan)
        with observed_by(decided):
            run_plan(prepared, first, fleet, folder, options, Watcher(advanced=advanced))


def _run_twice(
    scenario: Scenario, prepared: Prepared, fleet: Fleet, first: Plan, decisions: Decisions, folder: Path
) -> None:
    """The coordinator ends at once, and is started again from its record."""
    crew = Crew(port=free_port(), threads=[])
    replan = functools.partial(planned, scenario, prepared)

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train" and item.step == scenario.at:
            raise Crash

    with contextlib.suppress(Crash), observed_by(decisions.observe):
        options = RunOptions(backend=crew, replan=replan)
        run_plan(prepared, first, fleet, folder, options, Watcher(advanced=advanced))
    newest = CheckpointWriter(folder / "checkpoints").at(scenario.at // scenario.save_every * scenario.save_every)
    again = RunOptions(backend=crew, replan=replan, record=read_record(folder), resume_from=newest)
    with observed_by(decisions.observe):
        run_plan(prepared, first, fleet, folder, again, Watcher())


def _strike(fault: Fault, forwarder: Forwarder | None, backend: _Backend, stopped: list[int]) -> None:
    match fault.kind:
        case "lost":
            os.kill(_pid_of(fault.device), signal.SIGKILL)
        case "silent":
            stopped.append(_pid_of(fault.device))
            os.kill(stopped[-1], signal.SIGSTOP)
        case "link":
            assert forwarder is not None, "a link that is cut has one"
            threading.Thread(target=forwarder.cut, args=(fault.lasts_s,), daemon=True).start()
        case "leave":
            backend.leaving.add(fault.device)
        case _:  # what is slower is emulated: the job says so
            pass


def _pid_of(device: str) -> int:
    return devices_of(os.getpid())[device_of(device)]
