"""The host of a simulated run: the machines of a real one, on a virtual clock. It carries out every instruction.

    RunMachine ──instructions──► connections with latency ──► DeviceSession, Worker ──► World: time and links
        ▲                                                          │
        └──────────── events: reports, closed connections, ticks ◄─┘

Nothing is decided here. What must hold of a run's history is checked as it goes on (`history`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from isthmus.errors import InternalError, IsthmusError
from isthmus.fleet import Fleet
from isthmus.plans import Plan, PlanPeriod
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.coordinator_events import (
    AssignStage,
    BeginEpoch,
    CallDevice,
    CommitCheckpoint,
    Disconnect,
    FinishRun,
    ItemDone,
    MakePlan,
    NoPlan,
    Order,
    PlanMade,
    ReceiveState,
    ReleaseDevice,
)
from isthmus.protocol.interruptions import Recovery
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.phases import CoordinatorStatistics
from isthmus.protocol.recovery import Lineage, StateLayout
from isthmus.protocol.run_events import (
    AcceptReport,
    LinkProbed,
    Note,
    ProbeLink,
    RunEvent,
    RunInstruction,
    StepMeasured,
)
from isthmus.protocol.run_machine import TICK_S, Observe, RunMachine
from isthmus.protocol.run_messages import (
    DeviceOrder,
    DeviceReport,
    FetchState,
    Halt,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    SendState,
    StateFetched,
)
from isthmus.protocol.work import Item, RunSpec
from isthmus.protocol.worker import WorkerStatistics
from isthmus.simulator.connections import Connections
from isthmus.simulator.device import SimulatedWorker
from isthmus.simulator.epoch import Epoch
from isthmus.simulator.history import State, check_state
from isthmus.simulator.options import Fault, SimulationOptions
from isthmus.simulator.state_donations import StateDonations
from isthmus.simulator.strikes import Strikes
from isthmus.simulator.world import World
from isthmus.trace import Span, Trace

MOST_S = 1e5
"""A simulated run that lasts longer does not end."""


class Planner(Protocol):
    """Where plans come from while the run goes on."""

    def adaptation(self) -> Adaptation | None: ...

    def make(self, wanted: MakePlan) -> tuple[StateLayout, PlanFigures]:
        """UserError when there is none."""
        ...

    def begin(self, layout: StateLayout) -> None:
        """The plan of this layout is in force."""
        ...

    def eval_edges(self, plan: Plan) -> Mapping[tuple[int, int], int] | None:
        """Bytes per micro-batch that an evaluation sends from worker to worker; None: as in training."""
        ...


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a simulated run. Times are seconds since the first item was opened."""

    trace: Trace
    finish: FinishRun
    coordinator: CoordinatorStatistics
    workers: tuple[WorkerStatistics, ...]
    """Statistics of the first plan's workers that came to the run's end."""
    seconds: float
    recoveries: tuple[Recovery, ...]
    recovered_s: tuple[tuple[float, float], ...]
    """Seconds from when to when no device trained, for each recovery."""
    notes: tuple[tuple[float, str], ...]
    done_s: tuple[tuple[float, int], ...]
    """When all devices had done a step, and which; a step that was repeated comes again."""
    periods: tuple[PlanPeriod, ...]


class RunSimulation:
    """One run; `run` plays it to its end."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        spec: RunSpec,
        options: SimulationOptions,
        *,
        planner: Planner | None = None,
        layout: StateLayout | None = None,
        observe: Observe | None = None,
        advanced: Callable[[RunSimulation, Item], None] | None = None,
    ) -> None:
        """Without a planner, and its first plan's layout, the run ends when a device is lost. `advanced` is called
        when all devices have done an item."""
        self._options = options
        self._fleet = fleet
        self._spec = spec
        self._planner = planner
        self._observe = observe
        self._advanced = advanced
        self._plans: dict[int, Plan] = {0: plan}
        self._epoch = Epoch(plan, fleet, spec, options, layout)
        self._layout = layout
        self._begun: BeginEpoch | None = None
        self.world = World(fleet, options, self)
        self.connections = Connections(self.world, options, self.handle)
        self.strikes = Strikes(self.world, self.connections, options, self._restart)
        self._parts = layout.all_parts if layout is not None else frozenset[str]()
        self._lineage: tuple[tuple[int, int], ...] = ()
        self._store: State = {}
        self._checkpoints: dict[int, State] = {spec.start_step: dict.fromkeys(self._parts)}
        self._saved_step = spec.start_step
        self._saving: dict[int, dict[str, State]] = {}
        self._at_hand: tuple[str, Item, State] | None = None
        self._donations = StateDonations(self.world, self.connections)
        self._fresh = 0
        """Spans that the machine has heard of."""
        self._origin_s: float | None = None
        self._notes: list[tuple[float, str]] = []
        self._done: list[tuple[float, int]] = []
        self._periods: list[PlanPeriod] = []
        self._recovered: list[tuple[float, float]] = []
        self._known = 0
        """Recoveries of this coordinator that are in the list."""
        self._earlier: tuple[Recovery, ...] = ()
        """Recoveries of coordinators before this one."""
        self._statistics: dict[str, WorkerStatistics] = {}
        self._finished_s = 0.0
        self.finish: FinishRun | None = None
        self.machine = self._made(Coordinator(self._epoch.worker_ids, spec, layout=layout))

    def _made(self, coordinator: Coordinator) -> RunMachine:
        times = self._options.recovery
        return RunMachine(
            coordinator,
            timeout_s=times.timeout_s,
            start_s=times.start_s,
            adaptation=self._planner.adaptation() if self._planner is not None else None,
            observe=self._observe,
        )

    def run(self) -> SimulatedRun:
        """InternalError if the machines wait for each other, or the history is not what it must be."""
        for fault in filter(_is_there_at_first, self._options.faults):
            self.strikes.strike(fault)
        if self._options.faults or self._advanced is not None:
            self._tick()
        for worker_id in self._epoch.worker_ids:
            self.connections.join(worker_id)
        self.world.clock.run()
        if self.finish is None:
            raise InternalError(f"simulation: no machine has anything left to do, but the run is not over ({self})")
        if self.finish.outcome == "done":
            self._check(self._checkpoints[self._saved_step], self._spec.steps)
        return self._result(self.finish)

    def _strike(self, fault: Fault) -> None:
        if self.finish is None:
            self.strikes.strike(fault)

    def __str__(self) -> str:
        workers = (w for device in self.world.devices.values() for w in device.workers.values())
        waits = ", ".join(
            f"stage {w.number}: {w.machine.statistics().phase} after item {w.machine.statistics().item}"
            for w in workers
            if w.machine is not None
        )
        phase = self.machine.coordinator.phase if self.connections.answered else "away"
        return f"coordinator {phase}; {waits or 'no stage at work'}"

    def _result(self, finish: FinishRun) -> SimulatedRun:
        origin_s = self._origin_s or 0.0
        spans = tuple(self.world.spans) if not origin_s else tuple(_shifted(s, origin_s) for s in self.world.spans)
        period = self._epoch.plan.period
        return SimulatedRun(
            trace=Trace(source="simulator", run=self._options.run, spans=spans, period=period),
            finish=finish,
            coordinator=self.machine.coordinator.statistics(),
            workers=tuple(self._statistics[w] for w in self._plans[0].worker_ids if w in self._statistics),
            seconds=self._finished_s - origin_s,
            recoveries=(*self._earlier, *self.machine.recoveries),
            recovered_s=tuple((start_s - origin_s, end_s - origin_s) for start_s, end_s in self._recovered),
            notes=tuple((time_s - origin_s, text) for time_s, text in self._notes),
            done_s=tuple((time_s - origin_s, step) for time_s, step in self._done),
            periods=tuple(msgspec.structs.replace(p, since_s=max(0.0, p.since_s - origin_s)) for p in self._periods),
        )

    # Events for the machine

    def _tick(self) -> None:
        if self.finish is not None:
            return
        if self.world.clock.now_s > MOST_S:
            raise InternalError(f"simulation: the run does not end ({self})")
        self.handle(self.strikes.tick())
        self.world.later(TICK_S, "tick", self._tick)

    def handle(self, event: RunEvent) -> None:
        """Pass an event to the coordinator, if it is there."""
        machine = self.machine
        if not self.connections.answered or self.finish is not None:
            return
        for instruction in machine.handle(event, self.world.clock.now_s):
            self._carry_out(instruction, machine)
        if machine.urgent and self.finish is None:
            self.world.later(0.0, "urgent", partial(self._urgent, machine))

    def _urgent(self, machine: RunMachine) -> None:
        if self.machine is machine and machine.urgent:
            self.handle(self.strikes.tick())

    # What workers say

    def say(self, worker: SimulatedWorker, body: DeviceReport) -> None:
        self.connections.up(worker, body)

    def give(self, worker: SimulatedWorker, epoch: int, values: State) -> None:
        if self.connections.answered and self.machine.epoch == epoch:
            self._store = {**self._store, **values}
        self.connections.up(worker, StateFetched(epoch=epoch))

    def report(self, worker: SimulatedWorker, item: Item, saved: State) -> None:
        event = FromDevice(worker.name, ItemReported(item=item.index, epoch=worker.session.epoch))

        def arrive() -> None:
            self._at_hand = worker.name, item, saved
            self.handle(event)

        saves = item.kind == "save" and worker.number < self._epoch.savers
        self.connections.act_up(worker, arrive, self.world.copy_s(worker) if saves else 0.0)

    def stepped(self, worker: SimulatedWorker) -> None:
        self._donations.stepped(worker)

    def left(self, worker: SimulatedWorker) -> None:
        if worker.machine is not None:
            self._statistics[worker.name] = worker.machine.statistics()
        worker.device.workers.pop(worker.name, None)
        if not worker.device.workers:
            self.world.devices.pop(worker.device.name, None)

    # The coordinator's instructions

    def _carry_out(self, instruction: RunInstruction, machine: RunMachine) -> None:
        epoch, times = machine.epoch, self._options.recovery
        match instruction:
            case BeginEpoch():
                self._begin(instruction, machine.coordinator)
            case AssignStage(device=device):
                step = self._begun.step if self._begun is not None else self._spec.start_step
                self.connections.down(device, partial(_assign, self._epoch, epoch, step))
            case Order(device=device, body=body):
                self._order(device, body)
            case OpenItem():
                self._open(instruction, machine)
            case ItemDone(item=item):
                self._item_done(item)
            case CommitCheckpoint(item=item):
                self._commit(item)
            case Disconnect(device=device):
                self.connections.hang_up(device)
            case MakePlan():
                self.world.later(times.plan_s, "planner", partial(self._plan, instruction, epoch))
            case CallDevice(device=device):
                self.strikes.called(device_of(device))
                self.world.later(times.process_s, ("call", device), partial(self.connections.join, device))
            case ReceiveState():
                self._donations.receive(instruction)
            case RetireSnapshots() | Halt():
                for worker_id in list(self.connections.open):
                    self.connections.down(worker_id, lambda worker: worker.session.ordered(instruction))
            case ReleaseDevice(device=device):
                if (worker := self.connections.release(device)) is not None:
                    self.left(worker)
            case _:
                self._carry_out_further(instruction)

    def _carry_out_further(self, instruction: RunInstruction) -> None:
        match instruction:
            case FinishRun():
                self.finish, self._finished_s = instruction, self.world.clock.now_s
                self.connections.over = True
            case Note(text=text):
                self._notes.append((self.world.clock.now_s, text))
            case AcceptReport():
                self._accept()
            case ProbeLink(source=source, target=target):
                found = self.world.bandwidth(source, target)
                probed = LinkProbed(source=source, target=target, bandwidth_bytes_per_s=found)
                self.world.later(1.0, "probe", partial(self.handle, probed))
            case _:  # what only a person hears of, and who is not to come back
                pass

    def _order(self, device: str, body: DeviceOrder) -> None:
        match body:
            case PlaceWeights(own=own):
                parts = self._epoch.layout.parts.get(device, frozenset[str]()) - own
                placed = {part: self._store[part] for part in parts}
                self.connections.down(device, partial(_place, placed, body))
            case FetchState(parts=parts):
                self.connections.down(
                    device, lambda worker: worker.session.ordered(body), self._moving_s(device, parts)
                )
            case SendState():
                self.connections.down(device, partial(self._donations.send, body))
            case Pause():
                self.connections.down(device, lambda worker: worker.session.ordered(body))

    def _begin(self, begin: BeginEpoch, coordinator: Coordinator) -> None:
        lineage = Lineage(self._lineage)
        lineage.begin(begin.epoch, begin.step)
        self._lineage, self._begun = lineage.began, begin
        layout = coordinator.layout
        plan = self._plans[layout.number]
        self._layout = layout
        if self._planner is not None:
            self._planner.begin(layout)
        options = self._options
        if self._planner is not None:
            options = msgspec.structs.replace(options, eval_edges=self._planner.eval_edges(plan))
        self._epoch = Epoch(plan, self._fleet, self._spec, options, layout)
        now_s = self.world.clock.now_s
        self._periods.append(PlanPeriod(plan=plan, fleet=self._fleet, first_step=begin.step, since_s=now_s))
        if begin.from_checkpoint:
            self._store = self._checkpoints[begin.step]
        elif begin.epoch or self._lineage[0] != (begin.epoch, begin.step):
            self._store = {}
        self._saving.clear()
        self._donations.clear()

    def _open(self, opened: OpenItem, machine: RunMachine) -> None:
        if self._origin_s is None:
            self._origin_s = self.world.clock.now_s
            self.world.setting_up = True
            for fault in self._options.faults:
                if not _is_there_at_first(fault):
                    self.world.later(fault.time_s, ("fault", fault.device), partial(self._strike, fault))
        if len(machine.recoveries) > self._known:
            self._known, now_s = len(machine.recoveries), self.world.clock.now_s
            self._recovered.append((now_s - machine.recoveries[-1].seconds, now_s))
        for worker_id in machine.coordinator.devices:
            self.connections.down(worker_id, lambda worker: worker.opened(opened))

    def _accept(self) -> None:
        assert self._at_hand is not None, "only a report at hand is accepted"
        (name, item, saved), self._at_hand = self._at_hand, None
        if item.kind == "save":
            self._saving.setdefault(item.index, {})[name] = saved

    def _item_done(self, item: Item) -> None:
        now_s = self.world.clock.now_s
        if item.kind == "train":
            self._done.append((now_s, item.step))
            if self._planner is not None:
                spans, self._fresh = self.world.spans[self._fresh :], len(self.world.spans)
                self.world.later(
                    0.0, "measured", partial(self.handle, StepMeasured(step=item.step, spans=tuple(spans)))
                )
        if self._advanced is not None:
            self._advanced(self, item)

    def _commit(self, item: Item) -> None:
        saved = self._saving.pop(item.index, {})
        state = {part: value for values in saved.values() for part, value in values.items()}
        self._check(state, item.step)
        self._checkpoints[item.step] = state
        self._saved_step = item.step

    def _check(self, state: State, step: int) -> None:
        batch = self._spec.micro_batches * self._spec.micro_batch_size
        check_state(state, self._parts, step, batch, Lineage(self._lineage))

    def _plan(self, wanted: MakePlan, epoch: int) -> None:
        assert self._planner is not None, "a run that cannot plan again does not ask"
        try:
            layout, figures = self._planner.make(wanted)
        except IsthmusError as e:
            self.handle(NoPlan(reason=str(e), epoch=epoch))
            return
        self._plans[layout.number] = figures.plan
        self.handle(PlanMade(layout=layout, figures=figures, worth_it=wanted.must, epoch=epoch))

    def _moving_s(self, worker_id: str, parts: Sequence[str] | frozenset[str]) -> float:
        """To move these parts of a worker's state to the coordinator."""
        epoch, own = self._epoch, self._epoch.layout.parts.get(worker_id, frozenset[str]())
        if worker_id not in epoch.number or not own:
            return 0.0
        share = min(1.0, len(parts) / len(own))
        return share * epoch.copy_s[epoch.number[worker_id]]

    # The coordinator is away

    def _restart(self) -> None:
        """From what is on record alone."""
        spec = msgspec.structs.replace(self._spec, start_step=self._saved_step)
        newest = max((epoch for epoch, _ in self._lineage), default=-1)
        lineage = Lineage(self._lineage)
        made = Coordinator(self._epoch.worker_ids, spec, newest + 1, layout=self._layout, lineage=lineage)
        self._earlier += self.machine.recoveries
        self._known = 0
        self.machine = self._made(made)
        self.connections.answered = True


def _assign(epoch: Epoch, number: int, step: int, worker: SimulatedWorker) -> None:
    worker.assigned(epoch)
    worker.session.assigned(number, step)


def _place(placed: State, order: PlaceWeights, worker: SimulatedWorker) -> None:
    worker.placed = placed
    worker.session.ordered(order)


def _is_there_at_first(fault: Fault) -> bool:
    """Whether it is a device that comes before the run begins."""
    return fault.kind == "join" and not fault.time_s


def _shifted(span: Span, by_s: float) -> Span:
    return msgspec.structs.replace(span, start_s=span.start_s - by_s, end_s=span.end_s - by_s)
