"""The driver: the machines of `protocol` on a virtual clock and modelled links.

It takes the machines' instructions, says how long each takes, and feeds back what happened, as the runtime does with
tensors and sockets. Nothing is decided here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from isthmus.errors import InternalError, UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.plans.plan import Plan
from isthmus.protocol.compute_lane import ComputeLane
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.coordinator_events import (
    CoordinatorEvent,
    DeviceJoined,
    DeviceLost,
    DeviceReady,
    FinishRun,
    HaltDevices,
    ItemReported,
    OpenItem,
    PlaceWeights,
)
from isthmus.protocol.events import (
    Arrived,
    Collect,
    Collected,
    Compute,
    Computed,
    Fill,
    Filled,
    Halted,
    KeepSnapshot,
    Leave,
    Merge,
    Opened,
    PartsArrived,
    Report,
    Save,
    Saved,
    Send,
    SendParts,
    SnapshotKept,
    Take,
    Taken,
    Update,
    Updated,
    WorkerEvent,
    WorkerInstruction,
)
from isthmus.protocol.phases import CoordinatorStatistics
from isthmus.protocol.views import plan_views
from isthmus.protocol.work import Item, RunSpec, Share, shares
from isthmus.protocol.worker import Worker
from isthmus.protocol.worker_phases import WorkerStatistics
from isthmus.simulator.clock import VirtualClock
from isthmus.simulator.costs import Costs
from isthmus.simulator.jitter import Jitter
from isthmus.simulator.network import Network, Transmission
from isthmus.simulator.options import Fault, SimulationOptions
from isthmus.trace import Span, Trace


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulated run: its trace, how it ended, and the last state of the state machines."""

    trace: Trace
    finish: FinishRun
    coordinator: CoordinatorStatistics
    workers: tuple[WorkerStatistics, ...]


def simulate(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> Trace:
    """The trace of a run of `plan` on `fleet`. See `simulate_run`."""
    return simulate_run(plan, fleet, spec, options).trace


def simulate_run(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> SimulatedRun:
    """Run the plan's replicas on a virtual clock. The same arguments give the same result.

    Times in the trace are seconds since the coordinator opened the first item; joining and placing take none.
    Raises `UserError` for a plan that does not fit the fleet, or whose replicas share out another number of
    micro-batches than the run has; `InternalError` if the machines wait for each other.
    """
    if len(plan.replicas) > 1 and spec.micro_batches != plan.micro_batches:
        raise UserError(
            f"simulation: micro_batches: got {spec.micro_batches}, expected {plan.micro_batches}, "
            f"which the plan shares out to its {len(plan.replicas)} replicas"
        )
    return _RunSimulation(plan, fleet, spec, options or SimulationOptions()).run()


class _RunSimulation:
    def __init__(self, plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions) -> None:
        self._options = options
        self._devices = plan.devices
        self._period = plan.sync.period
        self._workers_of = _workers_of(plan)
        self._lanes = {device: ComputeLane() for device in self._workers_of}
        self._reports: dict[tuple[str, int], int] = {}
        """How many stages of a device have finished an item."""
        self._shares = _shares(plan, spec)
        views = plan_views(plan, clips=options.clips, counts=options.counts, eval_edges=options.eval_edges)
        self._workers = [Worker(view) for view in views]
        self._coordinator = Coordinator(self._workers_of, spec)
        self._clock = VirtualClock(options.seed)
        self._factor = Jitter(options.jitter, options.seed)
        self._network = Network(fleet, options.overheads.message_s, self._factor)
        self._costs = Costs(plan, fleet, options)
        self._items: dict[int, Item] = {}
        self._gone: dict[int, float] = {}
        self._finish: FinishRun | None = None
        self._spans: list[Span] = []

    def run(self) -> SimulatedRun:
        for fault in self._options.faults:
            if fault.device not in self._devices:
                raise unknown_name("device in the faults", fault.device, self._devices)
            self._clock.at(fault.time_s, ("fault", fault.device), partial(self._lose, fault))
        for device in self._workers_of:
            self._coordinate(DeviceJoined(device=device))
        self._clock.run()
        workers = tuple(worker.statistics() for worker in self._workers)
        if self._finish is None:
            waits = ", ".join(f"stage {s}: {w.phase} after item {w.item}" for s, w in enumerate(workers))
            raise InternalError(f"simulation: no machine has anything left to do, but the run is not over ({waits})")
        trace = Trace(source="simulator", run=self._options.run, spans=tuple(self._spans), period=self._period)
        coordinator = self._coordinator.statistics()
        return SimulatedRun(trace=trace, finish=self._finish, coordinator=coordinator, workers=workers)

    def _coordinate(self, event: CoordinatorEvent) -> None:
        for instruction in self._coordinator.handle(event):
            match instruction:
                case PlaceWeights(device=device):
                    ready = partial(self._coordinate, DeviceReady(device=device))
                    self._clock.at(self._clock.now_s, ("coordinator", device), ready)
                case OpenItem(item=item):
                    self._items[item.index] = item
                    for worker, share in enumerate(self._shares):
                        self._tell_later(worker, Opened(item=share.part(item)))
                case HaltDevices():
                    for worker in range(len(self._workers)):
                        self._tell_later(worker, Halted())
                case FinishRun():
                    self._finish = instruction
                case _:  # Assign, Advance and Commit cost nothing
                    pass

    def _tell_later(self, worker: int, event: WorkerEvent) -> None:
        time_s = self._clock.now_s + self._options.control_latency_s
        self._clock.at(time_s, ("control", worker), partial(self._tell, worker, event))

    def _tell_now(self, worker: int, event: WorkerEvent) -> None:
        """After whatever else happens at this moment."""
        self._clock.at(self._clock.now_s, ("compute", worker), partial(self._tell, worker, event))

    def _tell_coordinator(self, event: CoordinatorEvent, device: str, after_s: float = 0.0) -> None:
        time_s = self._clock.now_s + self._options.control_latency_s + after_s
        self._clock.at(time_s, ("coordinator", device), partial(self._coordinate, event))

    def _tell(self, worker: int, event: WorkerEvent) -> None:
        if worker not in self._gone:
            for instruction in self._workers[worker].handle(event):
                self._do(worker, instruction)

    def _do(self, worker: int, instruction: WorkerInstruction) -> None:
        match instruction:
            case Compute(work=work, item=item, micro_batch=micro_batch):
                done = Computed(work=work, item=item, micro_batch=micro_batch)
                self._occupy(worker, work, self._costs.tasklet_s(worker, work), done)
            case Send():
                self._send(worker, instruction)
            case SendParts():
                self._send_parts(worker, instruction)
            case Merge():  # adding what has arrived is charged to nobody
                pass
            case Fill(item=item):
                self._tell_now(worker, Filled(item=item))
            case Take(item=item):
                self._tell_now(worker, Taken(item=item))
            case Collect(item=item):
                self._tell_now(worker, Collected(item=item))
            case Update(item=item):
                self._occupy(worker, "update", self._costs.update_s(worker), Updated(item=item))
            case Save(item=item):
                self._occupy(worker, "save", self._options.save_s, Saved(item=item))
            case KeepSnapshot(item=item):
                self._tell_now(worker, SnapshotKept(item=item))
            case Report(item=item):
                self._report(self._devices[worker], item)
            case Leave():
                self._gone[worker] = self._clock.now_s

    def _report(self, device: str, item: int) -> None:
        """A device reports once all its stages have."""
        count = self._reports.pop((device, item), 0) + 1
        if count == len(self._workers_of[device]):
            self._tell_coordinator(ItemReported(device=device, item=item), device)
        else:
            self._reports[device, item] = count

    def _occupy(self, worker: int, name: str, seconds: float, done: Computed | Updated | Saved) -> None:
        """Hold the compute lane of the worker's device, as soon as it is free."""

        def begin() -> None:
            start_s = self._clock.now_s
            end_s = start_s + seconds * self._factor()
            self._clock.at(end_s, ("compute", worker), partial(self._release, worker, name, start_s, done))

        self._lanes[self._devices[worker]].take(name, worker, begin)

    def _release(self, worker: int, name: str, start_s: float, done: Computed | Updated | Saved) -> None:
        if worker in self._gone:
            return
        self._spans.append(
            Span(
                device=self._devices[worker],
                track="compute",
                name=name,
                start_s=start_s,
                end_s=self._clock.now_s,
                step=self._items[done.item].step,
                micro_batch=done.micro_batch if isinstance(done, Computed) else -1,
            )
        )
        self._tell(worker, done)
        self._lanes[self._devices[worker]].release()

    def _send(self, worker: int, send: Send) -> None:
        size_bytes = self._costs.parcel_bytes(send, worker, self._items[send.item].kind)
        message = _MessageOnLink(worker, send.target, send.parcel, send.item, size_bytes, send.micro_batch)
        arrived = Arrived(parcel=send.parcel, source=worker, item=send.item, micro_batch=send.micro_batch)
        self._transmit(message, lambda: self._tell(message.target, arrived))

    def _send_parts(self, worker: int, send: SendParts) -> None:
        message = _MessageOnLink(worker, send.target, "average", send.item, self._costs.part_bytes(send, worker))
        arrived = PartsArrived(group=send.group, round=send.round, source=worker, item=send.item)
        self._transmit(message, lambda: self._tell(send.target, arrived))

    def _transmit(self, message: _MessageOnLink, then: Callable[[], None]) -> None:
        """Put a message on its link; `then` is what its arrival means."""
        handover_s = self._options.overheads.handover_s
        if self._devices[message.source] == self._devices[message.target]:  # it never leaves the device
            self._clock.at(self._clock.now_s + handover_s, ("link", message.source, message.target), then)
            return
        times = self._network.send(
            self._clock.now_s + handover_s,
            self._devices[message.source],
            self._devices[message.target],
            message.size_bytes + self._options.header_bytes,
        )
        arrive = partial(self._arrive, message, times, then)
        self._clock.at(times.arrived_s + handover_s, ("link", message.source, message.target), arrive)

    def _arrive(self, message: _MessageOnLink, times: Transmission, then: Callable[[], None]) -> None:
        if self._gone.get(message.source, times.sent_s) < times.sent_s:
            return
        span = Span(
            device=self._devices[message.source],
            track="send",
            name=message.name,
            start_s=times.start_s,
            end_s=times.sent_s,
            step=self._items[message.item].step,
            micro_batch=message.micro_batch,
            size_bytes=message.size_bytes,
            other=self._devices[message.target],
            wire_bytes=message.size_bytes + self._options.header_bytes,
        )
        self._spans.append(span)
        if message.target in self._gone:
            return
        window = {"start_s": times.arrival_start_s, "end_s": times.arrived_s}
        self._spans.append(
            msgspec.structs.replace(span, device=span.other, track="receive", other=span.device, **window)
        )
        then()

    def _lose(self, fault: Fault) -> None:
        for worker in self._workers_of[fault.device]:
            self._gone.setdefault(worker, self._clock.now_s)
        self._tell_coordinator(DeviceLost(device=fault.device, reason="simulated"), fault.device, fault.noticed_after_s)


class _MessageOnLink(NamedTuple):
    """What crosses a link. Ends are numbers of workers."""

    source: int
    target: int
    name: str
    item: int
    size_bytes: int
    micro_batch: int = -1


def _shares(plan: Plan, spec: RunSpec) -> list[Share]:
    """Of each worker. An only replica does all, whatever number of micro-batches it was planned for."""
    counts = [r.micro_batches for r in plan.replicas] if len(plan.replicas) > 1 else [spec.micro_batches]
    each = zip(shares(counts, spec.micro_batch_size), plan.replicas, strict=True)
    return [share for share, replica in each for _ in replica.workers]


def _workers_of(plan: Plan) -> dict[str, list[int]]:
    """By device. It may run several stages of one replica, but no two that follow each other."""
    replica_of = [number for number, replica in enumerate(plan.replicas) for _ in replica.workers]
    chain = [stage for replica in plan.replicas for stage in replica.stage_of]
    found: dict[str, list[int]] = {}
    for worker, device in enumerate(plan.devices):
        found.setdefault(device, []).append(worker)
    for device, workers in found.items():
        for a, b in itertools.pairwise(workers):
            if replica_of[a] != replica_of[b] or chain[b] == chain[a] + 1:
                raise UserError(
                    f"plan: stages {a} and {b} are both on device {device!r}, expected stages of one replica that are "
                    "no neighbours"
                )
    return found
