"""The host of a simulated run: the machines of a real one, on a virtual clock. It does all that they ask.

    Pipeline ──its port──► connections with latency ──► DeviceSession, Worker ──► World: time and links
        ▲                                                      │
        └───────────── reports, closed connections, ticks ◄────┘

Nothing is decided here. What must hold of a run's history is checked as it goes on (`device.HistoryEntry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from isthmus.errors import InternalError, IsthmusError, UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.plans import Plan, PlanPeriod
from isthmus.plans.plan import device_of
from isthmus.programs.pipeline import Pipeline, PipelineStatistics
from isthmus.protocol.adaptation import Adaptation, PlanFigures
from isthmus.protocol.members import Recovery
from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout
from isthmus.protocol.run_messages import (
    DeviceOrder,
    DeviceReport,
    GiveState,
    Halt,
    Item,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    RetireSnapshots,
    RunSpec,
    SendState,
    TakeState,
)
from isthmus.protocol.run_ports import EpochStart, FinishRun, PipelinePort, PlanRequest
from isthmus.protocol.worker import WorkerStatistics
from isthmus.simulator.epoch import Epoch
from isthmus.simulator.options import Fault, SimulationOptions, WithoutEffect
from isthmus.simulator.parties import Connections, Party, SimulatedHost, Strikes
from isthmus.simulator.world import SimulatedWorker, State, StateDonations, World, check_state
from isthmus.trace import Span, Trace

MOST_S = 1e5  # a simulated run that lasts longer does not end


class Planner(Protocol):
    """Where plans come from while the run goes on."""

    def adaptation(self) -> Adaptation | None: ...

    def make(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures]:
        """UserError when there is none."""
        ...

    def begin(self, layout: StateLayout) -> None:
        """The plan of this layout is in force."""

    def eval_edges(self, plan: Plan) -> Mapping[tuple[int, int], int] | None:
        """Bytes per micro-batch that an evaluation sends from worker to worker; None: as in training."""
        ...


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a simulated run. Times are seconds since the first item was opened."""

    trace: Trace
    finish: FinishRun
    coordinator: PipelineStatistics
    workers: tuple[WorkerStatistics, ...]  # statistics of the first plan's workers that came to the run's end
    seconds: float
    recoveries: tuple[Recovery, ...]
    recovered_s: tuple[tuple[float, float], ...]  # seconds from when to when no device trained, for each recovery
    notes: tuple[tuple[float, str], ...]
    done_s: tuple[tuple[float, int], ...]
    """When all devices had done a step, and which; a step that was repeated comes again."""
    periods: tuple[PlanPeriod, ...]
    without_effect: WithoutEffect = ()


class RunSimulation(PipelinePort):
    """One run; `run` plays it to its end. Who is not to come back, and what only a person hears of, is not
    simulated."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        spec: RunSpec,
        options: SimulationOptions,
        *,
        planner: Planner | None = None,
        layout: StateLayout | None = None,
        advanced: Callable[[RunSimulation, Item], None] | None = None,
    ) -> None:
        """Without a planner, and its first plan's layout, the run ends when a device is lost. `advanced` is called
        when all devices have done an item."""
        self._options = options
        self._fleet = fleet
        self._spec = spec
        self._planner = planner
        self._advanced = advanced
        self._plans: dict[int, Plan] = {0: plan}
        self._epoch = Epoch(plan, fleet, spec, options, layout)
        self._layout = layout
        self._begun: EpochStart | None = None
        self.world = World(fleet, options, self)
        self.connections = Connections(self.world, options, self)
        self.strikes = Strikes(self.world, self.connections, options, self._restart)
        self._parts = layout.all_parts if layout is not None else frozenset[str]()
        self._lineage: tuple[tuple[int, int], ...] = ()
        self._store: State = {}
        self._checkpoints: dict[int, State] = {spec.start_step: dict.fromkeys(self._parts)}
        self._saved_step = spec.start_step
        self._saving: dict[int, dict[str, State]] = {}
        self._at_hand: tuple[str, Item, State] | None = None
        self._donations = StateDonations(self.world, self.connections)
        self._fresh = 0  # spans that the machine has heard of
        self._origin_s: float | None = None
        self._notes: list[tuple[float, str]] = []
        self._done: list[tuple[float, int]] = []
        self._periods: list[PlanPeriod] = []
        self._recovered: list[tuple[float, float]] = []
        self._known = 0  # recoveries of this coordinator that are in the list
        self._earlier: tuple[Recovery, ...] = ()  # recoveries of coordinators before this one
        self._statistics: dict[str, WorkerStatistics] = {}
        self._finished_s = 0.0
        self.finish: FinishRun | None = None
        machine = self._made(spec, None)
        regular = bool(options.faults) or advanced is not None
        self.host = SimulatedHost(machine, self.world.clock, self.strikes, regular=regular)
        self.tell = self.host.tell

    @property
    def machine(self) -> Pipeline:
        """The program of the coordinator that is there, or was there last."""
        return self.host.session

    def _made(self, spec: RunSpec, lineage: Lineage | None) -> Pipeline:
        """A coordinator of the run; with a lineage, one that is started again."""
        times = self._options.recovery
        machine = Pipeline(
            self._epoch.worker_ids,
            spec,
            timeout_s=times.timeout_s,
            start_s=times.start_s,
            layout=self._layout,
            lineage=lineage,
            adaptation=self._planner.adaptation() if self._planner is not None else None,
        )
        machine.port = self
        return machine

    def run(self) -> SimulatedRun:
        """InternalError if the machines wait for each other, or the history is not what it must be."""
        for fault in filter(_is_there_at_first, self._options.faults):
            self._strike(fault)
        for worker_id in self._epoch.worker_ids:
            self.connections.join(worker_id)
        self.world.clock.run(MOST_S)
        if self.finish is None:
            raise InternalError(f"simulation: no machine has anything left to do, but the run is not over ({self})")
        if self.finish.outcome == "done":
            self._check(self._checkpoints[self._saved_step], self._spec.steps)
        return self._result(self.finish)

    def _strike(self, fault: Fault) -> None:
        if self.finish is None:
            self.strikes.struck(fault)
            self.strikes.strike(fault)

    def __str__(self) -> str:
        workers = (w for device in self.world.devices.values() for w in device.workers.values())
        waits = ", ".join(
            f"stage {w.number}: {w.machine.statistics().phase} after item {w.machine.statistics().item}"
            for w in workers
            if w.machine is not None
        )
        phase = self.machine.phase if self.connections.answered else "away"
        return f"coordinator {phase}; {waits or 'no stage at work'}"

    def _result(self, finish: FinishRun) -> SimulatedRun:
        origin_s = self._origin_s or 0.0
        spans = tuple(self.world.spans) if not origin_s else tuple(_shifted(s, origin_s) for s in self.world.spans)
        period = self._epoch.plan.period
        return SimulatedRun(
            trace=Trace(source="simulator", run=self._options.run, spans=spans, period=period),
            finish=finish,
            coordinator=self.machine.statistics(),
            workers=tuple(self._statistics[w] for w in self._plans[0].worker_ids if w in self._statistics),
            seconds=self._finished_s - origin_s,
            recoveries=(*self._earlier, *self.machine.recoveries),
            recovered_s=tuple((start_s - origin_s, end_s - origin_s) for start_s, end_s in self._recovered),
            notes=tuple((time_s - origin_s, text) for time_s, text in self._notes),
            done_s=tuple((time_s - origin_s, step) for time_s, step in self._done),
            periods=tuple(msgspec.structs.replace(p, since_s=max(0.0, p.since_s - origin_s)) for p in self._periods),
            without_effect=self.world.effects.without,
        )

    # Calls of the machine

    def made(self, worker_id: str, device: Party[SimulatedWorker]) -> SimulatedWorker:
        return SimulatedWorker(worker_id, device, self.world)

    def arrived(self, worker: SimulatedWorker) -> None:
        self.joined(worker.name, worker.session.memory.holdings())

    def joined(self, device: str, holdings: tuple[StateHolding, ...]) -> None:
        self.tell(lambda machine: machine.joined(device, holdings))

    def heard(self, device: str, body: DeviceReport) -> None:
        self.tell(lambda machine: machine.heard(device, body))

    def disconnected(self, device: str, reason: str) -> None:
        self.host.disconnected(device, reason)

    # What workers say

    def say(self, worker: SimulatedWorker, body: DeviceReport) -> None:
        self.connections.up(worker, lambda: self.heard(worker.name, body))

    def report(self, worker: SimulatedWorker, item: Item, saved: State) -> None:
        report = ItemReported(item=item.index, epoch=worker.session.epoch)

        def arrive() -> None:
            self._at_hand = worker.name, item, saved
            self.heard(worker.name, report)

        saves = item.kind == "save" and worker.number < self._epoch.savers
        self.connections.up(worker, arrive, self.world.copy_s(worker) if saves else 0.0)

    def stepped(self, worker: SimulatedWorker) -> None:
        self._donations.stepped(worker)

    def left(self, worker: SimulatedWorker) -> None:
        if worker.machine is not None:
            self._statistics[worker.name] = worker.machine.statistics()
        worker.device.workers.pop(worker.name, None)
        if not worker.device.workers:
            self.world.devices.pop(worker.device.name, None)

    # What the machine asks

    def assign_stage(self, device: str) -> None:
        step = self._begun.step if self._begun is not None else self._spec.start_step
        self.connections.down(device, partial(_assign, self._epoch, self.machine.epoch, step))

    def retire_snapshots(self, order: RetireSnapshots | Halt) -> None:
        for worker_id in list(self.connections.open):
            self.connections.down(worker_id, lambda worker: worker.session.ordered(order))

    halt = retire_snapshots

    def disconnect(self, device: str) -> None:
        self.connections.hang_up(device)

    def make_plan(self, request: PlanRequest) -> None:
        self.world.later(self._options.recovery.plan_s, "planner", partial(self._plan, request))

    def call_device(self, device: str) -> None:
        self.strikes.call(device_of(device), device)

    def receive_state(self, device: str, number: int, step: int, donated: Mapping[str, frozenset[str]]) -> None:
        self._donations.receive(device, donated)

    def release_device(self, device: str) -> None:
        if (worker := self.connections.release(device)) is not None:
            self.left(worker)

    def finish_run(self, finish: FinishRun) -> None:
        self.finish, self._finished_s = finish, self.world.clock.now_s
        self.connections.over = True

    def note(self, text: str) -> None:
        self._notes.append((self.world.clock.now_s, text))

    def probe_link(self, source: str, target: str) -> None:
        found = self.world.bandwidth(source, target)
        probed = partial(self.tell, lambda machine: machine.probed(source, target, found))
        self.world.later(1.0, "probe", probed)

    def order(self, device: str, body: DeviceOrder) -> None:
        match body:
            case PlaceWeights(own=own, donors=donors):
                parts = self._epoch.layout.parts.get(device, frozenset[str]()) - own.union(*donors.values())
                placed = {part: self._store[part] for part in parts}
                self.connections.down(device, partial(_place, placed, body))
            case GiveState():
                self.connections.down(device, lambda worker: self.world.give(worker, body))
            case SendState():
                self.connections.down(device, partial(self._donations.send, body))
            case Pause() | TakeState():
                self.connections.down(device, lambda worker: worker.session.ordered(body))

    def begin_epoch(self, start: EpochStart) -> None:
        lineage = Lineage(self._lineage)
        lineage.begin(start.epoch, start.step)
        self._lineage, self._begun = lineage.began, start
        layout = self.machine.layout
        plan = self._plans[layout.number]
        self._layout = layout
        if self._planner is not None:
            self._planner.begin(layout)
        options = self._options
        if self._planner is not None:
            options = msgspec.structs.replace(options, eval_edges=self._planner.eval_edges(plan))
        self._epoch = Epoch(plan, self._fleet, self._spec, options, layout)
        now_s = self.world.clock.now_s
        self._periods.append(PlanPeriod(plan=plan, fleet=self._fleet, first_step=start.step, since_s=now_s))
        if start.from_checkpoint:
            self._store = self._checkpoints[start.step]
        elif start.epoch or self._lineage[0] != (start.epoch, start.step):
            self._store = {}
        self._saving.clear()
        self._donations.clear()

    def open_item(self, order: OpenItem) -> None:
        machine = self.machine
        if self._origin_s is None:
            self._origin_s = self.world.clock.now_s
            self.world.setting_up = True
            for fault in self._options.faults:
                if not _is_there_at_first(fault):
                    self.world.later(fault.time_s, ("fault", fault.device), partial(self._strike, fault))
        if len(machine.recoveries) > self._known:
            self._known, now_s = len(machine.recoveries), self.world.clock.now_s
            self._recovered.append((now_s - machine.recoveries[-1].seconds, now_s))
        for worker_id in machine.devices:
            self.connections.down(worker_id, lambda worker: worker.opened(order))

    def accept_report(self, device: str, item: int) -> None:
        assert self._at_hand is not None, "only a report at hand is accepted"
        (_, done, saved), self._at_hand = self._at_hand, None
        if done.kind == "save":
            self._saving.setdefault(item, {})[device] = saved

    def item_done(self, item: Item, loss: float | None, note: str, sums: tuple[float, ...]) -> None:
        now_s = self.world.clock.now_s
        if item.kind == "train":
            self._done.append((now_s, item.step))
            if self._planner is not None:
                spans, self._fresh = tuple(self.world.spans[self._fresh :]), len(self.world.spans)
                measured = partial(self.tell, lambda machine: machine.measured(item.step, spans))
                self.world.later(0.0, "measured", measured)
        if self._advanced is not None:
            self._advanced(self, item)

    def commit_checkpoint(self, item: Item, *, finite: bool) -> None:
        saved = self._saving.pop(item.index, {})
        state = {part: value for values in saved.values() for part, value in values.items()}
        self._check(state, item.step)
        self._checkpoints[item.step] = state
        self._saved_step = item.step

    def give_up_checkpoint(self, item: Item, device: str, reason: str) -> None:
        raise AssertionError("simulated devices write to no store")

    def _check(self, state: State, step: int) -> None:
        batch = self._spec.micro_batches * self._spec.micro_batch_size
        check_state(state, self._parts, step, batch, Lineage(self._lineage))

    def _plan(self, request: PlanRequest) -> None:
        assert self._planner is not None, "a run that cannot plan again does not ask"
        try:
            layout, figures = self._planner.make(request)
        except IsthmusError as e:
            reason = str(e)
            self.tell(lambda machine: machine.no_plan(request, reason))
            return
        self._plans[layout.number] = figures.plan
        self.tell(lambda machine: machine.planned(request, layout, figures))

    # The coordinator is away

    def _restart(self) -> None:
        """From what is on record alone."""
        spec = msgspec.structs.replace(self._spec, start_step=self._saved_step)
        made = self._made(spec, Lineage(self._lineage))
        self._earlier += self.machine.recoveries
        self._known = 0
        self.connections.answered = True
        self.host.replace(made)


def _assign(epoch: Epoch, number: int, step: int, worker: SimulatedWorker) -> None:
    worker.assigned(epoch)
    worker.session.assigned(number, step)


def _place(placed: State, order: PlaceWeights, worker: SimulatedWorker) -> None:
    worker.placed = placed
    worker.session.ordered(order)


def _is_there_at_first(fault: Fault) -> bool:
    """Return whether it is a device that comes before the run begins."""
    return fault.kind == "join" and not fault.time_s


def _shifted(span: Span, by_s: float) -> Span:
    return msgspec.structs.replace(span, start_s=span.start_s - by_s, end_s=span.end_s - by_s)


def simulate(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> Trace:
    """The trace of a run of `plan` on `fleet`. See `simulate_run`."""
    return simulate_run(plan, fleet, spec, options).trace


def simulate_run(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> SimulatedRun:
    """Run the plan's replicas on a virtual clock. The same arguments give the same result.

    Times in the trace are seconds since the coordinator opened the first item; joining and placing take none.
    Raises `UserError` for a plan that does not fit the fleet, or whose replicas share out another number of
    micro-batches than the run has; `InternalError` if the machines wait for each other.
    """
    options = options or SimulationOptions()
    if len(plan.replicas) > 1 and spec.micro_batches != plan.micro_batches:
        raise UserError(
            f"simulation: micro_batches: got {spec.micro_batches}, expected {plan.micro_batches}, "
            f"which the plan shares out to its {len(plan.replicas)} replicas"
        )
    check_faults(options.faults, fleet)
    return RunSimulation(plan, fleet, spec, options).run()


def check_faults(faults: Iterable[Fault], fleet: Fleet) -> None:
    """UserError for a fault of a device that the fleet does not have."""
    for fault in faults:
        for name in filter(None, (fault.device, fault.other)):
            if name not in fleet.names:
                raise unknown_name(f"device in {fault.option}", name, fleet.names)
