"""The driver: the machines of `protocol` on a virtual clock and modelled links.

It takes the machines' instructions, says how long each takes, and feeds back what happened, as the runtime does with
tensors and sockets. Nothing is decided here.
"""

from __future__ import annotations

from functools import partial

import msgspec

from isthmus.errors import InternalError, UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.plan.plan import Plan
from isthmus.protocol.coordinator import Coordinator, CoordinatorStatistics
from isthmus.protocol.events import (
    Arrived,
    Collect,
    Collected,
    Compute,
    Computed,
    CoordinatorEvent,
    Finish,
    Halt,
    Halted,
    Joined,
    Lost,
    Open,
    Opened,
    Place,
    Ready,
    Report,
    Reported,
    Save,
    Saved,
    Send,
    Stop,
    Update,
    Updated,
    WorkerEvent,
    WorkerInstruction,
)
from isthmus.protocol.views import stage_views
from isthmus.protocol.work import Item, RunSpec
from isthmus.protocol.worker import Worker, WorkerStatistics
from isthmus.simulator.clock import Clock
from isthmus.simulator.costs import Costs
from isthmus.simulator.jitter import Jitter
from isthmus.simulator.network import Network, Transmission
from isthmus.simulator.options import Fault, SimulationOptions
from isthmus.trace import Span, Trace


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run left: its trace, how it ended, and the machines' last state."""

    trace: Trace
    finish: Finish
    coordinator: CoordinatorStatistics
    workers: tuple[WorkerStatistics, ...]


def simulate(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> Trace:
    """The trace of a run of `plan` on `fleet`. See `simulate_run`."""
    return simulate_run(plan, fleet, spec, options).trace


def simulate_run(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> SimulatedRun:
    """Run the plan's only replica on a virtual clock. The same arguments give the same result.

    Times in the trace are seconds since the coordinator opened the first item; joining and placing take none.
    Raises `UserError` for a plan that does not fit the fleet, `InternalError` if the machines wait for each other.
    """
    return _Simulation(plan, fleet, spec, options or SimulationOptions()).run()


class _Simulation:
    def __init__(self, plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions) -> None:
        eval_edges = None if options.eval_edges is None else options.eval_edges.keys()
        views = stage_views(plan, clips=options.clips, counts=options.counts, eval_edges=eval_edges)
        self._options = options
        self._devices = _distinct_devices(plan)
        self._workers = [Worker(view) for view in views]
        self._coordinator = Coordinator(self._devices, spec)
        self._clock = Clock(options.seed)
        self._factor = Jitter(options.jitter, options.seed)
        self._costs = Costs(plan, fleet, options)
        self._network = Network(fleet, options.overheads.message_s, self._factor)
        self._items: dict[int, Item] = {}
        self._gone: dict[int, float] = {}
        self._finish: Finish | None = None
        self._spans: list[Span] = []

    def run(self) -> SimulatedRun:
        for fault in self._options.faults:
            if fault.device not in self._devices:
                raise unknown_name("device in the faults", fault.device, self._devices)
            self._clock.at(fault.time_s, ("fault", fault.device), partial(self._lose, fault))
        for device in self._devices:
            self._coordinate(Joined(device=device))
        self._clock.run()
        workers = tuple(worker.statistics() for worker in self._workers)
        if self._finish is None:
            waits = ", ".join(f"stage {s}: {w.phase} after item {w.item}" for s, w in enumerate(workers))
            raise InternalError(f"simulation: no machine has anything left to do, but the run is not over ({waits})")
        trace = Trace(source="simulator", run=self._options.run, spans=tuple(self._spans))
        coordinator = self._coordinator.statistics()
        return SimulatedRun(trace=trace, finish=self._finish, coordinator=coordinator, workers=workers)

    def _coordinate(self, event: CoordinatorEvent) -> None:
        for instruction in self._coordinator.handle(event):
            match instruction:
                case Place(device=device):
                    ready = partial(self._coordinate, Ready(device=device))
                    self._clock.at(self._clock.now_s, ("coordinator", device), ready)
                case Open(item=item):
                    self._items[item.index] = item
                    self._tell_all(Opened(item=item))
                case Halt():
                    self._tell_all(Halted())
                case Finish():
                    self._finish = instruction
                case _:  # Assign, Advance and Commit cost nothing
                    pass

    def _tell_all(self, event: WorkerEvent) -> None:
        time_s = self._clock.now_s + self._options.control_latency_s
        for stage in range(len(self._workers)):
            self._clock.at(time_s, ("control", stage), partial(self._tell, stage, event))

    def _tell_coordinator(self, event: CoordinatorEvent, device: str, after_s: float = 0.0) -> None:
        time_s = self._clock.now_s + self._options.control_latency_s + after_s
        self._clock.at(time_s, ("coordinator", device), partial(self._coordinate, event))

    def _tell(self, stage: int, event: WorkerEvent) -> None:
        if stage not in self._gone:
            for instruction in self._workers[stage].handle(event):
                self._do(stage, instruction)

    def _do(self, stage: int, instruction: WorkerInstruction) -> None:
        match instruction:
            case Compute(work=work, item=item, micro_batch=micro_batch):
                done = Computed(work=work, item=item, micro_batch=micro_batch)
                self._occupy(stage, work, self._costs.tasklet_s(stage, work), done)
            case Send():
                self._send(stage, instruction)
            case Collect(item=item):
                collected = partial(self._tell, stage, Collected(item=item))
                self._clock.at(self._clock.now_s, ("compute", stage), collected)
            case Update(item=item):
                self._occupy(stage, "update", self._costs.update_s(stage), Updated(item=item))
            case Save(item=item):
                self._occupy(stage, "save", self._options.save_s, Saved(item=item))
            case Report(item=item):
                device = self._devices[stage]
                self._tell_coordinator(Reported(device=device, item=item), device)
            case Stop():
                self._gone[stage] = self._clock.now_s

    def _occupy(self, stage: int, name: str, seconds: float, done: Computed | Updated | Saved) -> None:
        """Hold the stage's compute lane."""
        start_s = self._clock.now_s
        end_s = start_s + seconds * self._factor()
        self._clock.at(end_s, ("compute", stage), partial(self._release, stage, name, start_s, done))

    def _release(self, stage: int, name: str, start_s: float, done: Computed | Updated | Saved) -> None:
        if stage in self._gone:
            return
        self._spans.append(
            Span(
                device=self._devices[stage],
                track="compute",
                name=name,
                start_s=start_s,
                end_s=self._clock.now_s,
                step=self._items[done.item].step,
                micro_batch=done.micro_batch if isinstance(done, Computed) else -1,
            )
        )
        self._tell(stage, done)

    def _send(self, stage: int, send: Send) -> None:
        size_bytes = self._costs.parcel_bytes(send.parcel, stage, send.target, self._items[send.item].kind)
        handover_s = self._options.overheads.handover_s
        times = self._network.send(
            self._clock.now_s + handover_s, self._devices[stage], self._devices[send.target],
            size_bytes + self._options.header_bytes,
        )  # fmt: skip
        arrive = partial(self._arrive, stage, send, size_bytes, times)
        self._clock.at(times.arrived_s + handover_s, ("link", stage, send.target), arrive)

    def _arrive(self, source: int, send: Send, size_bytes: int, times: Transmission) -> None:
        if self._gone.get(source, times.sent_s) < times.sent_s:
            return
        span = Span(
            device=self._devices[source],
            track="send",
            name=send.parcel,
            start_s=times.start_s,
            end_s=times.sent_s,
            step=self._items[send.item].step,
            micro_batch=send.micro_batch,
            size_bytes=size_bytes,
            other=self._devices[send.target],
            wire_bytes=size_bytes + self._options.header_bytes,
        )
        self._spans.append(span)
        if send.target in self._gone:
            return
        window = {"start_s": times.arrival_start_s, "end_s": times.arrived_s}
        self._spans.append(
            msgspec.structs.replace(span, device=span.other, track="receive", other=span.device, **window)
        )
        arrived = Arrived(parcel=send.parcel, source=source, item=send.item, micro_batch=send.micro_batch)
        self._tell(send.target, arrived)

    def _lose(self, fault: Fault) -> None:
        stage = self._devices.index(fault.device)
        self._gone.setdefault(stage, self._clock.now_s)
        self._tell_coordinator(Lost(device=fault.device, reason="simulated"), fault.device, fault.noticed_after_s)


def _distinct_devices(plan: Plan) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        if (other := first.setdefault(stage.device, number)) != number:
            raise UserError(
                f"plan: stages {other} and {number} are both on device {stage.device!r}, expected one stage per device"
            )
    return tuple(first)
