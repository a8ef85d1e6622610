"""Drawn integers in the frames of a pipeline's run: between devices and their coordinator, and between devices. Each
goes through the decoder, the receiver's check and its machine, which keeps to what the plan allows. Then the right
message continues the run, which ends as an undisturbed one does.

The conversation is that of the simulator, whose machines are those of real runs: losses, recoveries, snapshots, joins.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from isthmus.errors import PeerError
from isthmus.plans.plan import device_of
from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import RunSpec
from isthmus.protocol.adaptation import Adaptation
from isthmus.protocol.arrivals import StageArrivals
from isthmus.protocol.device_session import DeviceSession, SessionOrder, SessionPort
from isthmus.protocol.recovery import Lineage, StateHolding
from isthmus.protocol.run_messages import (
    Arrived,
    DeviceFailed,
    DeviceReport,
    OpenItem,
    PartsArrived,
)
from isthmus.protocol.run_ports import EpochStart, FinishRun, PipelinePort
from isthmus.protocol.worker import StagePort, Worker
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.device.fingerprints import Fingerprinter
from isthmus.runtime.device.links import Expected, StageLinks
from isthmus.runtime.device.snapshots import SnapshotReceiver
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import JoinRun, ToCoordinator, ToDevice, ToPeer
from isthmus.session.program import OVER
from isthmus.session.session import Observation
from isthmus.simulator import run as simulation
from isthmus.simulator.world import SimulatedWorker
from isthmus.training.layout import header_of
from tests.faults import simulated
from tests.faults.schedule import Fault, Schedule

from ..drawn_integers import Lies, landed
from ..programs.ports import Recorder
from .test_coordinator_host import NotedScript

pytestmark = pytest.mark.thorough

RUN = "run"
SPEC = RunSpec(
    steps=7, micro_batches=2, micro_batch_size=2, save_every=3, eval_every=3, eval_micro_batches=1, lease_ahead=2
)
SCHEDULE = Schedule(
    seed=5,
    devices=3,
    layers=5,
    spares=1,
    spec=SPEC,
    keep_every=1,
    latency_s=0.01,
    timeout_s=3.0,
    faults=(Fault(2.0, "kill", 1, 0, 1.0), Fault(6.0, "join", 0, 0, 0.0)),
    repeats=True,
    recalls=True,
)
TENSOR = torch.zeros(2)
LINK_OF = {"forward", "backward"}


class _Script(NotedScript):
    def check_state(self, device: str, tensors: object) -> None:
        pass


class _Links(StageLinks):
    """Of one stage, without connections: what it takes goes into its inbox."""

    def __init__(self, worker: LiedWorker, arrivals: StageArrivals) -> None:
        machine, epoch = worker.machine, worker.epoch
        assert machine is not None and epoch is not None
        view = machine.view
        signature = (("x:0", "float32", (2,), None),)
        parcels: dict[Any, Any] = {("forward", s): {signature} for s in (*view.forward_from, *view.eval_from)}
        parcels |= {("backward", s): {signature} for s in view.backward_from}
        parcels |= {("shared", s): {()} for s in view.parameter_owners}
        parcels |= {("shared_gradient", s): {()} for s in view.parameter_users}
        parcels |= {(kind, s): {()} for s in view.others for kind in ("count", "norms")}
        self._run, self._epoch = RUN, machine.epoch
        self._expected = Expected(parcels)
        self._snapshot_copies = SnapshotReceiver({}, lambda stage, step, taken: None)
        self._arrivals, self._checking = arrivals, cast(Any, _NoLock())
        self._ways, self._credits, self._tensors, self._numbers = {}, {}, {}, {}
        self._fingerprints, self._spans = Fingerprinter(None), lambda span: None
        names = {n: SimpleNamespace(device=device_of(w)) for n, w in enumerate(epoch.worker_ids)}
        self._names = cast(Any, names)
        self._assignment = cast(Any, SimpleNamespace(device=worker.name))
        self._inbox = queue.SimpleQueue()


class _NoLock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class LiedSession(DeviceSession[Any]):
    """The session of a device: each order is also drawn anew."""

    def ordered(self, order: SessionOrder) -> None:
        def lie(message: AnyMessage) -> None:
            landed(message)
            session = copy.deepcopy(self, {id(self.port): Recorder(SessionPort)})
            DeviceSession.ordered(session, cast(Any, message).body)
            assert session.phase in ("idle", "connecting", "starting", "working", "over") and session.epoch >= 0
            held = {(h.epoch, h.step) for h in self.memory.holdings()}
            assert {(h.epoch, h.step) for h in session.memory.holdings()} <= held

        cast(LiedWorker, self.port).run.lies_about(ToDevice(run=RUN, body=order), lie, "to devices")
        super().ordered(order)


class LiedWorker(SimulatedWorker):
    """A device's worker to which others lie."""

    arrivals: StageArrivals | None = None

    def __init__(self, *figures: Any) -> None:
        super().__init__(*figures)
        self.session = LiedSession()
        self.session.port = self

    @property
    def run(self) -> LiedTo:
        return cast(Any, self._around)._coordination

    def _start(self, step: int, own: frozenset[str], epoch: int) -> None:
        before = self.machine
        super()._start(step, own, epoch)
        if self.machine is before or self.machine is None:
            return
        assert self.epoch is not None and self.run._begun is not None
        spec = self.run._spec
        self.arrivals = StageArrivals(
            self.machine.view,
            self.epoch.shares[self.number],
            {number: device_of(worker) for number, worker in enumerate(self.epoch.worker_ids)},
            start_step=step,
            first_item=self.run._begun.first_item,
            lease_ahead=spec.lease_ahead,
            eval_micro_batches=spec.eval_micro_batches,
        )

    def opened(self, opened: OpenItem) -> None:
        if self._hears(opened.epoch):
            self.run.lies_about(ToDevice(run=RUN, body=opened), self._lie_opened, "to devices", "coordinator")
            cast(StageArrivals, self.arrivals).opened(opened.item)
        super().opened(opened)

    def arrived(self, body: Arrived | PartsArrived) -> None:
        if self._hears(body.epoch):
            self._lie_arrived(body)
        super().arrived(body)

    def _hears(self, epoch: int) -> bool:
        return self.machine is not None and self.arrivals is not None and epoch == self.machine.epoch

    def _lie_opened(self, message: AnyMessage) -> None:
        landed(message)
        opened = cast(ToDevice, message).body
        assert isinstance(opened, OpenItem) and self.machine is not None
        if opened.epoch == self.machine.epoch:
            copy.deepcopy(self.arrivals).opened(opened.item)  # pyright: ignore[reportOptionalMemberAccess]
            raise AssertionError(f"{opened} is none of the run's")
        machine, port = _copied(self.machine)
        machine.opened(opened.item, opened.epoch)
        assert port.took() == []

    def _lie_arrived(self, right: Arrived | PartsArrived) -> None:
        assert self.arrivals is not None and self.epoch is not None
        tensors = [TENSOR] if isinstance(right, Arrived) and right.parcel in LINK_OF else []
        headers = tuple(header_of("x:0", tensor) for tensor in tensors)
        name = f"device {device_of(self.epoch.worker_ids[right.source])!r}"
        message = ToPeer(run=RUN, body=right, tensors=headers)

        def lie(told: AnyMessage) -> None:
            self._take(told, tensors, right, name)

        if device_of(self.epoch.worker_ids[right.source]) != self.device.name:
            self.run.lies_about(message, lie, "to peers", name)
        self.arrivals.arrived(right)

    def _take(self, message: AnyMessage, tensors: list[torch.Tensor], right: Any, name: str) -> None:
        assert self.machine is not None and self.arrivals is not None
        arrivals = copy.deepcopy(self.arrivals)
        links, channel = _Links(self, arrivals), SimpleNamespace(other=name, began_s=0.0)
        try:
            message, found = landed(message, tensors, links._guard)
        except PeerError as e:
            raise PeerError(f"{name}: {e}") from None  # as the channel does
        links._accept(right.source, cast(Any, channel), message, found)
        machine, _ = _copied(self.machine)
        while not links._inbox.empty():
            taken = cast(Any, links._inbox.get())
            machine.arrived(taken)
            assert arrivals._first <= taken.item <= arrivals._reports + SPEC.lease_ahead
        own = machine.statistics()
        assert own.phase != "over" and own.item < arrivals._opens
        assert max(own.forwards, own.backwards) <= SPEC.micro_batches
        assert all(key[2] < SPEC.micro_batches for key in machine._arrived)

    def report(self, item: int) -> None:
        if self.arrivals is not None:
            self.arrivals.reported(item)
        super().report(item)


def _copied(machine: Worker) -> tuple[Worker, Recorder]:
    port = Recorder(StagePort)
    return copy.deepcopy(machine, {id(machine.view): machine.view, id(machine.port): port}), port


class LiedTo(simulated.FollowedRun):
    lies: dict[str, Lies] | None = None
    """By direction."""
    messages: dict[str, int]

    def lies_about(self, right: msgspec.Struct, take: Any, way: str, names: str = "") -> None:
        self.messages[way] = self.messages.get(way, 0) + 1
        if self.lies is not None:
            self.lies[way].about(right, take, names=names)

    def _made(self, spec: RunSpec, lineage: Lineage | None) -> Pipeline:
        self.messages = getattr(self, "messages", {})
        self._log: list[tuple[Callable[[Pipeline], None], float]] = []
        plans = cast(Any, self._planner)
        devices, layout, number = self._epoch.worker_ids, self._layout, plans.layout.number
        before = None if lineage is None else lineage.began

        def again() -> tuple[Pipeline, Recorder]:
            times = self._options.recovery
            machine = Pipeline(
                devices,
                spec,
                timeout_s=times.timeout_s,
                start_s=times.start_s,
                layout=layout,
                lineage=None if before is None else Lineage(before),
                adaptation=Adaptation(plans._plans[number], plans._fleet, SPEC.steps, number=number),
            )
            machine.port = (port := Recorder(PipelinePort)).port
            return machine, port

        self._again = again
        machine = super()._made(spec, lineage)
        port = machine.port
        self._host = CoordinatorHost(machine, RUN, cast(Any, _Script()), timeout_s=3.0)
        machine.port = port
        return machine

    def tell(self, happened: Callable[[Pipeline], None]) -> None:
        if self.connections.answered and self.finish is None:
            self._log.append((happened, self.world.clock.now_s))
        super().tell(happened)

    def heard(self, device: str, body: DeviceReport) -> None:
        if self.connections.answered and self.finish is None:
            self._lie(device, ToCoordinator(run=RUN, body=body))
        super().heard(device, body)

    def joined(self, device: str, holdings: tuple[StateHolding, ...]) -> None:
        if self.connections.answered and self.finish is None:
            self._lie(device, JoinRun(run=RUN, device=device, host="h", port=7, holdings=holdings))
        super().joined(device, holdings)

    def open_item(self, order: OpenItem) -> None:
        self._host._items[order.item.index] = order.item
        super().open_item(order)

    def _lie(self, device: str, message: JoinRun | ToCoordinator) -> None:
        def hear(machine: Pipeline, told: AnyMessage) -> None:
            machine.clock(self.world.clock.now_s)
            if isinstance(told, JoinRun):
                machine.joined(device, told.holdings)
            else:
                machine.heard(device, cast(Any, told).body)

        def take(told: AnyMessage) -> None:
            if isinstance(told, JoinRun):
                landed(told)
            else:
                try:
                    landed(told, (), lambda m: self._host.guard(device, m))
                except PeerError as e:
                    raise PeerError(f"device {device!r}: {e}") from None
            machine, port = self._again()
            for before, then_s in self._log:
                machine.clock(then_s)
                before(machine)
            known = len(machine._failures._reported)
            port.took()
            hear(machine, told)
            if len(machine._failures._reported) > known:
                whose, error = (loss := machine._failures._reported[-1]).device, loss.failure
                assert whose == device_of(device)
                machine.looked(Observation())
                assert ("reject_device", device, str(error), True) in port.took()
                raise PeerError(str(error))
            self._judge(machine, port)
            hear(machine, message)
            self._judge(machine, port)

        self.lies_about(message, take, "to the coordinator", f"device {device!r}")

    def _judge(self, machine: Pipeline, port: Recorder) -> None:
        leases = machine.leases
        assert machine.phase in (*Pipeline.reports[DeviceFailed].phases, OVER)
        assert 0 <= machine._done_step <= leases.last_step <= SPEC.steps
        assert machine._saved <= leases.last_step and leases.acknowledged <= leases.last_step
        assert leases.finished <= leases.leased and max(leases.open, default=0) <= leases.leased
        assert machine.epoch <= self.machine.epoch + 1
        most = max((step for _, step in self._done), default=0) + SPEC.lease_ahead + 1
        for held in (h for holdings in machine.members.holdings.values() for h in holdings):
            assert held.step <= SPEC.steps and held.epoch <= machine.epoch
        if machine._transfer is not None:
            assert all(step <= leases.last_step for step in machine._transfer._at.values())
        for said in (said for call in port.took() for said in call):
            assert not isinstance(said, EpochStart) or said.step <= min(most, SPEC.steps)
            assert not isinstance(said, FinishRun) or (said.outcome, machine._done_step) == ("done", SPEC.steps)


def conversation(monkeypatch: pytest.MonkeyPatch, lies: dict[str, Lies] | None) -> LiedTo:
    monkeypatch.setattr(simulation, "SimulatedWorker", LiedWorker)
    monkeypatch.setattr(simulated, "FollowedRun", LiedTo)
    run = simulated.Simulated(SCHEDULE)
    found = cast(LiedTo, run.simulation)
    found.lies = lies
    found.result = run.run() and run.result  # type: ignore[attr-defined]
    return found


def test_a_drawn_integer_is_refused_or_one_that_the_run_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    right = conversation(monkeypatch, None)
    assert set(right.messages) == {"to the coordinator", "to devices", "to peers"}
    lies = {way: Lies(number, count) for number, (way, count) in enumerate(right.messages.items())}
    disturbed = conversation(monkeypatch, lies)
    for told in lies.values():
        told.told()
    assert cast(Any, disturbed).result == cast(Any, right).result
