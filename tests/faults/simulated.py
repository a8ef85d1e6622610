"""A run in the product's simulator, with everything going wrong that a schedule says, and plans drawn at random.

The simulator checks the run's history: every part of the model went through the same updates, each range of samples
once and in order, and nothing is restored from a line that ended. Checked here: a step that a complete snapshot holds
is not lost with any one device.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from isthmus.errors import UserError
from isthmus.fleet import Fleet, Link
from isthmus.plans import Plan
from isthmus.plans.plan import StageMemory
from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import Lineage, RunSpec, StateLayout
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.run_messages import DeviceReport, StateReceived
from isthmus.protocol.run_ports import FinishRun, PlanRequest
from isthmus.simulator import Fault, RecoveryTimes, SimulationOptions
from isthmus.simulator.run import RunSimulation
from tests.programs.ports import Watched
from tests.simulator.plans import make_fleet, make_plan

from .schedule import Fault as Drawn
from .schedule import Schedule

STATE = StageMemory(weights=10_000, gradients=10_000, optimizer=20_000, activations=0)
LINK = Link(0.005, 40_000.0)
"""A copy of a stage's state takes a second and a half of its spare time."""


class Plans:
    """Layers shared out in order, at random places, over devices chosen at random."""

    def __init__(self, schedule: Schedule, fleet: Fleet, devices: Sequence[str]) -> None:
        self._schedule = schedule
        self._fleet = fleet
        self._draw = random.Random(schedule.seed)
        self._layers = [f"layer {n}" for n in range(schedule.layers)]
        self._numbers = itertools.count()
        self._plans: dict[int, Plan] = {}
        self.layout, self.first = self._made(devices)

    def adaptation(self) -> Adaptation:
        number = self.layout.number
        return Adaptation(self._plans[number], self._fleet, self._schedule.spec.steps, number=number)

    def begin(self, layout: StateLayout) -> None:
        self.layout = layout

    def eval_edges(self, plan: Plan) -> None:
        return None

    def make(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures]:
        if not request.devices or self._draw.random() < 0.02:
            raise UserError("none fits")
        most = min(len(request.devices), self._schedule.layers)
        count = most if self._draw.random() < 0.7 else self._draw.randint(1, most)
        layout, plan = self._made(sorted(self._draw.sample(request.devices, count)))
        return layout, PlanFigures(plan=plan, step_s=1000.0 if self._draw.random() < 0.7 else 0.0)

    def _made(self, devices: Sequence[str]) -> tuple[StateLayout, Plan]:
        schedule = self._schedule
        cuts = sorted(self._draw.sample(range(1, schedule.layers), len(devices) - 1))
        ends = [0, *cuts, schedule.layers]
        layers = (frozenset(self._layers[a:b]) for a, b in itertools.pairwise(ends))
        parts = dict(zip(devices, layers, strict=True))
        layout = StateLayout(parts=parts, number=next(self._numbers), repeats=schedule.repeats)
        if len(devices) > 1:  # a single device has nobody to keep a copy
            turned = dict(zip(devices, (*devices[1:], devices[0]), strict=True))
            layout = msgspec.structs.replace(layout, snapshot_copies=turned, keep_every=schedule.keep_every)
        plan = self._plans[layout.number] = _plan(devices, schedule.spec.micro_batches)
        return layout, plan


def _plan(devices: Sequence[str], micro_batches: int) -> Plan:
    plan = make_plan([(25, 50)] * len(devices), micro_batches=micro_batches)
    (replica,) = plan.replicas
    stages = tuple(
        msgspec.structs.replace(stage, device=device, memory=STATE)
        for stage, device in zip(replica.stages, devices, strict=True)
    )
    return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages),))


class FollowedRun(RunSimulation):
    """It tells what the machine asks, and what it hears."""

    follow: Callable[..., None] | None = None

    def _made(self, spec: RunSpec, lineage: Lineage | None) -> Pipeline:
        machine = super()._made(spec, lineage)
        machine.port = Watched(self, self._asked).port
        return machine

    def _asked(self, *asked: object) -> None:
        if self.follow is not None:
            self.follow(*asked)

    def heard(self, device: str, body: DeviceReport) -> None:
        if self.connections.answered and self.finish is None:
            self._asked("heard", device, body)
        super().heard(device, body)


class Simulated:
    """Build it, `run` it: an error says what was violated."""

    def __init__(self, schedule: Schedule) -> None:
        joins = sum(fault.kind == "join" for fault in schedule.faults)
        count = schedule.devices + schedule.spares
        fleet = make_fleet(count + joins, LINK)
        self.schedule = schedule
        self.recalls = self.state_received = self.snapshots = 0
        self._lost_since: set[str] = set()
        self._acknowledged = schedule.spec.start_step
        self._names = fleet.names[:count]
        spares = [Fault(kind="join", device=name, time_s=0.0) for name in fleet.names[schedule.devices : count]]
        newcomers = iter(fleet.names[count:])
        faults = [self._fault(fault, newcomers) for fault in schedule.faults if fault.kind != "change"]
        plans = Plans(schedule, fleet, fleet.names[: schedule.devices])
        options = SimulationOptions(
            update_s=0.02,
            save_s=0.1,
            control_latency_s=schedule.latency_s,
            jitter=0.7,
            seed=schedule.seed,
            faults=(*spares, *faults),
            recovery=RecoveryTimes(
                plan_s=0.7,
                process_s=0.2,
                stage_s=0.05,
                control_s_per_byte=dict.fromkeys(fleet.names, 1 / 60_000),
                timeout_s=schedule.timeout_s,
                start_s=2 * schedule.timeout_s,
            ),
        )
        self.simulation = FollowedRun(plans.first, fleet, schedule.spec, options, planner=plans, layout=plans.layout)
        self.simulation.follow = self._follow
        changed = partial(self.simulation.tell, lambda machine: machine.fleet_changed())
        for fault in schedule.faults:
            if fault.kind == "change":
                self.simulation.world.later(fault.time_s, "change", changed)

    def _fault(self, drawn: Drawn, newcomers: Iterator[str]) -> Fault:
        names, lasts_s = self._names, drawn.lasts_s
        name, other = names[drawn.device % len(names)], names[drawn.other % len(names)]
        match drawn.kind:
            case "kill":
                return Fault(device=name, time_s=drawn.time_s, lasts_s=lasts_s if self.schedule.recalls else math.inf)
            case "stall":
                return Fault(kind="silent", device=name, time_s=drawn.time_s, lasts_s=lasts_s)
            case "cut":
                return Fault(kind="link", device=name, other=other, time_s=drawn.time_s, lasts_s=lasts_s)
            case "crash":
                return Fault(kind="coordinator", time_s=drawn.time_s, lasts_s=lasts_s)
            case "leave":
                return Fault(kind="leave", device=name, time_s=drawn.time_s)
            case _:
                return Fault(kind="join", device=next(newcomers), time_s=drawn.time_s)

    def run(self) -> FinishRun:
        found = self.simulation.run()
        self.recoveries = len(found.recoveries)
        self.end_s, self.finish, self.result = found.seconds, found.finish, found
        return found.finish

    def _follow(self, name: str, *given: Any) -> None:
        match name, *given:
            case "heard", _, StateReceived():
                self.state_received += 1
            case "retire_snapshots", order:
                self._acknowledged, self._lost_since = order.step, set()
                self.snapshots += 1
            case "disconnect" | "release_device", device:
                self._lost_since.add(device)
            case "restart_run", *_:
                self.recalls += 1
            case "begin_epoch", start if len(self._lost_since) <= 1:
                assert start.step >= self._acknowledged, (
                    f"step {self._acknowledged} was in a complete snapshot and is lost with {self._lost_since}"
                )
            case _:
                pass
