"""Simulated devices of a pipeline, and their surroundings: time, links and faults. The policies of real devices decide.

A worker has a `DeviceSession`, and while it has a stage a `Worker`: it is the port of both. What takes time, and what
crosses a link, is for the surroundings to say.

The weights of a simulated run are the list of the updates made to them. A check says which lists are right.

Every part of the model goes through the same updates: each range of samples once and in order, and none of an epoch's
line that ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from isthmus.errors import InternalError
from isthmus.fleet import Fleet
from isthmus.plans.plan import device_of
from isthmus.protocol.device_session import DeviceSession
from isthmus.protocol.recovery import Lineage
from isthmus.protocol.run_messages import (
    Arrived,
    DeviceFailed,
    DeviceReady,
    DeviceReport,
    GiveState,
    Inventory,
    Item,
    OpenItem,
    Parcel,
    PartsArrived,
    SendState,
    SnapshotCopied,
    StateMissing,
    StateReceived,
    TransferEnded,
    Work,
)
from isthmus.protocol.worker import Worker
from isthmus.simulator.epoch import Costs, Epoch
from isthmus.simulator.options import SimulationOptions
from isthmus.simulator.parties import Act, Connections, LinkedParties, Party, Transmission
from isthmus.trace import Span


class HistoryEntry:
    """The newest update of a part, with those before it; None stands for the model's own weights."""

    __slots__ = ("before", "epoch", "first_sample", "steps")

    def __init__(self, before: HistoryEntry | None, first_sample: int, epoch: int) -> None:
        self.before = before
        self.first_sample = first_sample
        self.epoch = epoch
        self.steps: int = 1 if before is None else before.steps + 1


State = Mapping[str, HistoryEntry | None]  # the newest update of each part


def updated(state: State, first_sample: int, epoch: int) -> State:
    """The state after one more step, of all replicas' samples from `first_sample` on."""
    made: dict[int, HistoryEntry] = {}
    return {part: made.setdefault(id(last), HistoryEntry(last, first_sample, epoch)) for part, last in state.items()}


def after(state: State, step: int, parts: Iterable[str]) -> State:
    """Parts of the state as they were after so many steps."""
    found: dict[str, HistoryEntry | None] = {}
    for part in parts:
        last = state[part]
        while last is not None and last.steps > step:
            last = last.before
        found[part] = last
    return found


def check_state(state: State, parts: Iterable[str], step: int, batch: int, lineage: Lineage) -> None:
    """InternalError unless every part went through `step` updates, of `batch` samples each, in order, on one line."""
    missing = set(parts) - state.keys()
    if missing:
        raise InternalError(f"simulation: the state after step {step} lacks {sorted(missing)}")
    for last in {id(last): last for last in state.values()}.values():
        updates = list(_updates(last))
        if [u.first_sample for u in updates] != [n * batch for n in range(step)]:
            raise InternalError(f"simulation: samples from {[u.first_sample for u in updates]} on, in {step} steps")
        if any(a.epoch > b.epoch for a, b in itertools.pairwise(updates)):
            raise InternalError("simulation: an epoch went on from a later one")
        for at, update in enumerate(updates):
            if not lineage.counts(update.epoch, at + 1):
                raise InternalError(f"simulation: step {at} of epoch {update.epoch} is of a line that ended")


def _updates(last: HistoryEntry | None) -> Iterable[HistoryEntry]:
    found: list[HistoryEntry] = []
    while last is not None:
        found.append(last)
        last = last.before
    return reversed(found)


KEPT_ITEMS = 1000


class Surroundings(Protocol):
    """How a worker reaches others, and how long things take."""

    def occupy(
        self, worker: SimulatedWorker, name: str, seconds: float, item: Item, done: Act, micro_batch: int = -1
    ) -> None:
        """Hold the compute lane of the worker's device, as soon as it is free; then it is done, unless the stage was
        closed meanwhile."""

    def at_once(self, worker: SimulatedWorker, act: Act) -> None:
        """After whatever else happens at this moment."""

    def transmit(self, worker: SimulatedWorker, target: int, body: Arrived | PartsArrived, item: Item) -> None: ...

    def connect(self, worker: SimulatedWorker, connected: Act) -> None: ...

    def start(self, worker: SimulatedWorker, own: frozenset[str], started: Act) -> None: ...

    def say(self, worker: SimulatedWorker, body: DeviceReport) -> None:
        """To the coordinator."""

    def fetch(self, worker: SimulatedWorker, step: int, donor: str, parts: frozenset[str]) -> None:
        """Have another worker give this one parts of a state, as soon as it is ordered to."""

    def kept(self, worker: SimulatedWorker, step: int, values: State) -> None:
        """A snapshot is in the worker's memory: its copy may go to another one."""

    def report(self, worker: SimulatedWorker, item: Item, saved: State) -> None: ...

    def stepped(self, worker: SimulatedWorker) -> None: ...

    def left(self, worker: SimulatedWorker) -> None: ...


class SimulatedWorker:
    def __init__(self, name: str, device: Party[SimulatedWorker], around: Surroundings) -> None:
        self.name = name
        self.device = device
        self.session: DeviceSession[HistoryEntry | None] = DeviceSession()
        self.session.port = self
        self.epoch: Epoch | None = None  # the plan epoch of its stage
        self.number = -1  # in that epoch's plan
        self.machine: Worker | None = None
        self.live: State = {}
        self.step = 0  # how many updates its state has had
        self.placed: State = {}
        self.gives: dict[tuple[int, str], frozenset[str]] = {}  # by epoch and receiver, the parts that it is to give
        self.gives_epoch = -1  # the newest of them
        self._around = around
        self._items: dict[int, Item] = {}
        self._first_samples: dict[int, int] = {}  # the first sample of each item, of all replicas
        self._saved: State = {}

    def assigned(self, epoch: Epoch) -> None:
        self.epoch, self.number = epoch, epoch.number[self.name]

    def opened(self, opened: OpenItem) -> None:
        """The coordinator opens an item."""
        machine, item = self.machine, opened.item
        if machine is None:
            return
        if opened.epoch == machine.epoch:
            assert self.epoch is not None, "a stage has an epoch"
            self._first_samples[item.index] = item.first_sample
            item = self._items[item.index] = self.epoch.shares[self.number].part(item)
        machine.opened(item, opened.epoch)

    def arrived(self, body: Arrived | PartsArrived) -> None:
        """It comes from another stage."""
        if self.machine is not None:
            self.machine.arrived(body)

    # What the session asks

    def connect(self) -> None:
        self._around.connect(self, partial(self.session.connected, self.session.epoch))

    def start(self, step: int, own: frozenset[str]) -> None:
        self._around.start(self, own, partial(self._start, step, own, self.session.epoch))

    def inventory(self) -> None:
        self._around.say(self, Inventory(holdings=self.session.memory.holdings(), epoch=self.session.epoch))

    def ready(self) -> None:
        self._around.say(self, DeviceReady(epoch=self.session.epoch))

    def copied(self, step: int, of: str) -> None:
        self._around.say(self, SnapshotCopied(of=of, step=step, epoch=self.session.epoch))

    def fetch(self, step: int, donors: Mapping[str, frozenset[str]]) -> None:
        for donor, parts in sorted(donors.items()):
            self._around.fetch(self, step, donor, parts)

    def missing(self, donor: str, parts: frozenset[str], reason: str) -> None:
        missing = StateMissing(donor=donor, parts=parts, reason=reason, epoch=self.session.epoch)
        self._around.say(self, missing)

    def leave(self) -> None:
        if self.machine is not None:
            self.machine.halt()
        self._around.left(self)

    def close_stage(self) -> None:
        machine, self.machine = self.machine, None
        if machine is not None and self.live and machine.is_recoverable(self.step):
            self.session.kept(machine.epoch, self.step, self.live)
        self.live = {}

    def _start(self, step: int, own: frozenset[str], epoch: int) -> None:
        if self.session.phase != "starting" or self.session.epoch != epoch:
            return
        assert self.epoch is not None, "a stage has an epoch"
        self.live = {**self.placed, **self.session.memory.values(step, own)}
        self.step, self._items, self._first_samples = step, {}, {}
        self.machine = Worker(self.epoch.views[self.number], self, epoch)
        self.session.started(epoch)

    # What the stage's worker asks

    def compute(self, work: Work, item: int, micro_batch: int) -> None:
        machine, costs = self._at_work()
        done = partial(machine.computed, work, item, micro_batch)
        self._around.occupy(self, work, costs.tasklet_s(self.number, work), self._items[item], done, micro_batch)

    def send(self, parcel: Parcel, target: int, item: int, micro_batch: int = -1) -> None:
        epoch = self._at_work()[0].epoch
        body = Arrived(parcel=parcel, source=self.number, item=item, micro_batch=micro_batch, epoch=epoch)
        self._around.transmit(self, target, body, self._items[item])

    def send_parts(self, group: int, turn: int, target: int, item: int) -> None:
        epoch = self._at_work()[0].epoch
        body = PartsArrived(group=group, round=turn, source=self.number, item=item, epoch=epoch)
        self._around.transmit(self, target, body, self._items[item])

    def merge(self, group: int, turn: int, item: int) -> None:
        """It takes no time."""

    def fill(self, item: int, groups: tuple[int, ...]) -> None:
        self._at_once(Worker.filled, item)

    def take(self, item: int, groups: tuple[int, ...]) -> None:
        self._at_once(Worker.taken, item)

    def collect(self, item: int) -> None:
        self._at_once(Worker.collected, item)

    def update(self, item: int, *, skip: bool) -> None:
        machine, costs = self._at_work()
        done = partial(self._updated, machine, self._items[item])
        self._around.occupy(self, "update", costs.update_s(self.number), self._items[item], done)

    def save(self, item: int) -> None:
        machine, costs = self._at_work()
        self._saved = dict(self.live)
        self._around.occupy(self, "save", costs.save_s, self._items[item], partial(machine.saved, item))

    def keep(self, item: int) -> None:
        step, values = self._items[item].step, dict(self.live)
        self.session.kept(self._at_work()[0].epoch, step, values)
        self._around.kept(self, step, values)
        self._at_once(Worker.kept, item)

    def report(self, item: int) -> None:
        saved, self._saved = self._saved, {}
        self._items.pop(item - KEPT_ITEMS, None)  # a sum may still be sent some steps later
        self._around.report(self, self._items[item], saved)

    def state_after(self, step: int, parts: frozenset[str]) -> State:
        return after(self.live, step, parts)

    def _updated(self, machine: Worker, item: Item) -> None:
        self.live = updated(self.live, self._first_samples.pop(item.index), machine.epoch)
        self.step = item.step + 1
        self._around.stepped(self)
        machine.updated(item.index)

    def _at_once(self, ended: Callable[[Worker, int], None], item: int) -> None:
        machine, _ = self._at_work()

        def end() -> None:
            if self.machine is machine:  # else the stage was closed meanwhile
                ended(machine, item)

        self._around.at_once(self, end)

    def _at_work(self) -> tuple[Worker, Costs]:
        assert self.machine is not None and self.epoch is not None, "a stage at work has a worker and an epoch"
        return self.machine, self.epoch.costs


SPARE_SHARE = 0.5  # the share of a link that copies of snapshots take


class _Request(NamedTuple):
    """A worker wants parts of the state after `step` steps, under an epoch, from another one."""

    receiver: SimulatedWorker
    epoch: int
    step: int
    donor: str
    parts: frozenset[str]


class Coordination(Protocol):
    """Messages of devices to their coordinator, which travel on its connections."""

    def say(self, worker: SimulatedWorker, body: DeviceReport) -> None: ...

    def report(self, worker: SimulatedWorker, item: Item, saved: State) -> None: ...

    def stepped(self, worker: SimulatedWorker) -> None: ...

    def left(self, worker: SimulatedWorker) -> None: ...


class World(LinkedParties[SimulatedWorker]):
    """Carries out what workers of a pipeline ask for; `coordination` hears what they say."""

    def __init__(self, fleet: Fleet, options: SimulationOptions, coordination: Coordination) -> None:
        super().__init__(fleet, options)
        self.spans: list[Span] = []
        self._coordination = coordination
        self.say = coordination.say
        self._requests: dict[str, list[_Request]] = {}
        """Requests for state, by the worker that gives it, of which its coordinator has not told it yet."""
        self.report = coordination.report
        self.stepped = coordination.stepped
        self.left = coordination.left

    # Stages

    def at_once(self, worker: SimulatedWorker, act: Act) -> None:
        self.later(0.0, ("compute", worker.number), partial(self.on, worker.device, act))

    def occupy(
        self, worker: SimulatedWorker, name: str, seconds: float, item: Item, done: Act, micro_batch: int = -1
    ) -> None:
        machine, lane = worker.machine, worker.device.lane
        slow = self.slowed(worker.device.name)

        def begin() -> None:
            if worker.machine is not machine:  # it was closed while this waited
                lane.release()
                return
            end = partial(self.on, worker.device, partial(release, self.clock.now_s))
            self.later(seconds * slow * self._factor(), ("compute", worker.number), end)

        def release(start_s: float) -> None:
            if worker.machine is machine:
                self.spans.append(
                    Span(
                        device=worker.device.name,
                        track="compute",
                        name=name,
                        start_s=start_s,
                        end_s=self.clock.now_s,
                        step=item.step,
                        micro_batch=micro_batch,
                    )
                )
                done()
            lane.release()

        lane.take(name, worker.number, begin)

    # Stages

    def connect(self, worker: SimulatedWorker, connected: Act) -> None:
        epoch = worker.epoch
        assert epoch is not None, "who connects has a stage"
        number, now_s = worker.session.epoch, self.clock.now_s
        others = [device_of(other) for other in epoch.neighbours[worker.name]]
        until_s = max((self.cut_until_s(worker.device.name, other) for other in others), default=0.0)
        if until_s - now_s > self._options.recovery.timeout_s:
            lost = partial(self._give_up, worker, number, "cannot connect to another device")
            self.later(
                self._options.recovery.timeout_s, ("connect", worker.name), partial(self.on, worker.device, lost)
            )
            return
        latencies = [self._fleet.link(worker.device.name, other).latency_s for other in others]
        wait_s = max(until_s - now_s, 0.0) + (3 * max(latencies, default=0.0) if self.setting_up else 0.0)
        self.later(wait_s, ("connect", worker.name), partial(self.on, worker.device, connected))

    def start(self, worker: SimulatedWorker, own: frozenset[str], started: Act) -> None:
        epoch, times = worker.epoch, self._options.recovery
        assert epoch is not None, "who starts a stage has one"
        parts = epoch.layout.parts.get(worker.name, frozenset[str]())
        share = len(parts - own) / len(parts) if parts else 0.0
        wait_s = times.stage_s + share * self.copy_s(worker) if self.setting_up else 0.0
        self.later(wait_s, ("start", worker.name), partial(self.on, worker.device, started))

    def _give_up(self, worker: SimulatedWorker, epoch: int, reason: str) -> None:
        """A worker cannot go on because of another one."""
        if worker.session.epoch == epoch and worker.session.phase in ("connecting", "starting", "working"):
            worker.session.failed(epoch)
            self._coordination.say(worker, DeviceFailed(reason=reason, fault="other", epoch=epoch))

    # Links

    def transmit(self, worker: SimulatedWorker, target: int, body: Arrived | PartsArrived, item: Item) -> None:
        epoch = worker.epoch
        assert epoch is not None, "who sends has a stage"
        if isinstance(body, Arrived):
            size_bytes = epoch.costs.parcel_bytes(body, target, item.kind)
            name, micro_batch = body.parcel, body.micro_batch
        else:
            size_bytes, name, micro_batch = epoch.costs.part_bytes(body, target), "average", -1
        receiver, source, there = epoch.worker_ids[target], worker.device.name, epoch.devices[target]
        lane = ("link", worker.number, target)
        handover_s, now_s = self._options.overheads.handover_s, self.clock.now_s
        if source == there:  # it never leaves the device
            self.clock.at(now_s + handover_s, lane, partial(self._deliver, receiver, there, body))
            return
        until_s = self.cut_until_s(source, there)
        if until_s - now_s > self._options.recovery.timeout_s:
            return  # nobody waits for so long
        sent_bytes = size_bytes + self._options.header_bytes
        times = self._network.send(max(now_s, until_s) + handover_s, source, there, sent_bytes)
        sent = Span(
            device=source,
            track="send",
            name=name,
            start_s=times.start_s,
            end_s=times.sent_s,
            step=item.step,
            micro_batch=micro_batch,
            size_bytes=size_bytes,
            other=there,
            wire_bytes=sent_bytes,
        )
        arrive = partial(self._arrive, worker.device, sent, times, receiver, body)
        self.clock.at(times.arrived_s + handover_s, lane, arrive)

    def _arrive(
        self,
        source: Party[SimulatedWorker],
        sent: Span,
        times: Transmission,
        receiver: str,
        body: Arrived | PartsArrived,
    ) -> None:
        if source.died_s < times.sent_s:
            return
        self.spans.append(sent)
        if sent.other not in self.devices:
            return
        window = {"start_s": times.arrival_start_s, "end_s": times.arrived_s}
        self.spans.append(
            msgspec.structs.replace(sent, device=sent.other, track="receive", other=sent.device, **window)
        )
        self._deliver(receiver, sent.other, body)

    def _deliver(self, worker_id: str, device: str, body: Arrived | PartsArrived) -> None:
        there = self.devices.get(device)
        if there is None or (worker := there.workers.get(worker_id)) is None:
            return
        if there.waiting is None:
            worker.arrived(body)
        else:
            self.on(there, partial(worker.arrived, body))

    # State

    def fetch(self, worker: SimulatedWorker, step: int, donor: str, parts: frozenset[str]) -> None:
        request = _Request(worker, worker.session.epoch, step, donor, parts)
        source, target = device_of(donor), worker.device.name
        latency_s = self.latency_s(target, source) if source != target else 0.0
        if source not in self.devices:
            self._refuse(request, latency_s, "is not there")
        elif (wait_s := self._blocked_s(source, target)) > self._options.recovery.timeout_s:
            self._refuse(request, self._options.recovery.timeout_s, "cannot be reached")
        else:
            self.later(latency_s + wait_s, ("fetch", worker.name), partial(self._ask, request))

    def _blocked_s(self, source: str, target: str) -> float:
        """Seconds until something passes between two devices."""
        return max(0.0, self.cut_until_s(source, target) - self.clock.now_s)

    def _refuse(self, request: _Request, after_s: float, how: str) -> None:
        receiver = request.receiver
        reason = f"device {device_of(request.donor)!r} {how}"
        lost = partial(receiver.session.unfetched, request.epoch, request.donor, reason)
        self.later(after_s, ("fetch", receiver.name), partial(self.on, receiver.device, lost))

    def _ask(self, request: _Request) -> None:
        """The request is at the donor."""
        donor = self.worker(request.donor)
        if donor is None or request.epoch < donor.gives_epoch:
            self._refuse(request, 0.0, "gives nothing")
        elif not request.parts <= donor.gives.get((request.epoch, request.receiver.name), frozenset()):
            self._requests.setdefault(request.donor, []).append(request)
        else:
            self._give(request, donor, sorted(donor.session.memory.values(request.step, request.parts).items()))

    def give(self, donor: SimulatedWorker, order: GiveState) -> None:
        """The donor's coordinator has told it to."""
        donor.gives_epoch = max(donor.gives_epoch, order.epoch)
        for receiver, parts in order.receivers.items():
            before = donor.gives.get((order.epoch, receiver), frozenset())
            donor.gives[order.epoch, receiver] = before | parts
        for request in self._requests.pop(donor.name, []):
            self._ask(request)

    def _give(self, request: _Request, donor: SimulatedWorker, left: Sequence[tuple[str, HistoryEntry | None]]) -> None:
        """One part after the other, while the donor runs and the link is whole."""
        receiver, source = request.receiver, donor.device.name
        target = receiver.device.name
        if not left or donor.gives_epoch > request.epoch:
            return
        (part, value), *rest = left
        fetched = partial(receiver.session.fetched, request.epoch, request.donor, {part: value})
        following = partial(self.on, donor.device, partial(self._give, request, donor, rest))
        if source == target:
            self.on(receiver.device, fetched)
            following()
            return
        if (wait_s := self._blocked_s(source, target)) > self._options.recovery.timeout_s:
            return  # nobody waits for so long
        assert receiver.epoch is not None, "who gets state has a stage"
        size_bytes = receiver.epoch.part_bytes(receiver.name, part)
        times = self._network.send(self.clock.now_s + wait_s, source, target, size_bytes)

        def arrive() -> None:
            if donor.device.died_s >= times.sent_s:
                self.on(receiver.device, fetched)

        self.clock.at(times.arrived_s, ("fetch", receiver.name), arrive)
        self.clock.at(times.sent_s, ("give", donor.name), following)

    def state_arrives_s(self, donor: SimulatedWorker, target: str, parts: Iterable[str], share: float) -> float | None:
        """Send a share of the bytes of these parts of a donor's state; return when they arrive, None where the link is
        cut for too long."""
        assert donor.epoch is not None, "who gives its state has a stage"
        source, now_s = donor.device.name, self.clock.now_s
        if (wait_s := self._blocked_s(source, target)) > self.timeout_s:
            return None
        size_bytes = round(share * sum(donor.epoch.part_bytes(donor.name, part) for part in parts))
        return now_s if source == target else self._network.send(now_s + wait_s, source, target, size_bytes).arrived_s

    @property
    def timeout_s(self) -> float:
        return self._options.recovery.timeout_s

    def kept(self, worker: SimulatedWorker, step: int, values: State) -> None:
        """A snapshot is in memory: its copy travels in the spare time of a link."""
        epoch, number = worker.epoch, worker.session.epoch
        assert epoch is not None, "who keeps snapshots has a stage"
        holder = epoch.layout.snapshot_copies.get(worker.name)
        if holder is None:
            return
        source, target = worker.device.name, epoch.devices[epoch.number[holder]]
        link = self._fleet.link(source, target)
        rate = SPARE_SHARE * link.bandwidth_bytes_per_s
        seconds = link.latency_s + epoch.state_bytes[worker.number] / rate * self._factor()

        def arrive() -> None:
            there, alive = self.devices.get(target), self.devices.get(source) is worker.device
            until_s = self.cut_until_s(source, target)
            if until_s > self.clock.now_s:
                self.later(until_s - self.clock.now_s, ("snapshot", worker.name), arrive)
            elif there is not None and alive and (keeper := there.workers.get(holder)) is not None:
                self.on(there, partial(keeper.session.kept, number, step, values, worker.name))

        self.later(seconds, ("snapshot", worker.name), arrive)

    # What goes wrong

    def noticed(self, device: Party[SimulatedWorker], after_s: Callable[[str], float], how: str) -> None:
        """Let those who have links to a device's stages, or get state from it, give up."""
        for other in list(self.devices.values()):
            for worker in other.workers.values() if other is not device else ():
                for name in device.workers:
                    reason = f"device {device.name!r} {how}"
                    lost = partial(worker.session.unfetched, worker.session.epoch, name, reason)
                    self.later(after_s(other.name), ("notice", worker.name), partial(self.on, other, lost))
        own = {worker.name: worker for worker in device.workers.values() if worker.epoch is not None}
        for other in list(self.devices.values()):
            for worker in other.workers.values() if other is not device else ():
                number, epoch = worker.session.epoch, worker.epoch
                if epoch is None or not any(
                    own[name].session.epoch == number for name in epoch.neighbours[worker.name] if name in own
                ):
                    continue
                lost = partial(self._give_up, worker, number, f"device {device.name!r} {how}")
                self.later(after_s(other.name), ("notice", worker.name), partial(self.on, other, lost))

    def blame(self, name: str, other: str) -> None:
        """A device has heard nothing from another one for too long."""
        device, there = self.devices.get(name), self.devices.get(other)
        if device is None or there is None or self._cut_until_s(name, other) <= self.clock.now_s:
            return
        for worker in device.workers.values():
            epoch = worker.epoch
            for name in there.workers:
                reason = f"device {other!r}: stalled for {self._options.recovery.timeout_s:g} s"
                self.on(device, partial(worker.session.unfetched, worker.session.epoch, name, reason))
            if epoch is not None and any(n in there.workers for n in epoch.neighbours[worker.name]):
                why = f"device {other!r}: stalled for {self._options.recovery.timeout_s:g} s"
                self.effects.met("link", device.name, other)
                self.on(device, partial(self._give_up, worker, worker.session.epoch, why))

    def copy_s(self, worker: SimulatedWorker) -> float:
        assert worker.epoch is not None, "who gives or gets its state has a stage"
        return worker.epoch.copy_s[worker.number]


MOST_BACKLOG = 2.0
"""Copies of the state that may be on their way; with more, steps are quicker than their gradients travel."""


GRADIENTS_SHARE = 1 / 3  # bytes of a step's gradients, as a share of those of the state with Adam


class _Donation(NamedTuple):
    asked: SendState
    donor: SimulatedWorker


class StateDonations:
    """State goes over the links from donors to joining devices."""

    def __init__(self, world: World, connections: Connections[SimulatedWorker]) -> None:
        self._world = world
        self._connections = connections
        self._receivers: dict[str, list[tuple[str, frozenset[str]]]] = {}
        """Joining devices that get state from each donor, and of which parts."""
        self._donations: dict[str, _Donation] = {}
        self._through_s: dict[str, float] = {}  # seconds at which all that each donor has sent so far has arrived
        self._copy_s: dict[str, float] = {}  # seconds that the first copy of each donor's state takes

    def clear(self) -> None:
        self._receivers.clear()
        self._donations.clear()
        self._through_s.clear()
        self._copy_s.clear()

    def receive(self, device: str, donated: Mapping[str, frozenset[str]]) -> None:
        for donor, parts in donated.items():
            self._receivers.setdefault(donor, []).append((device, parts))

    def send(self, asked: SendState, donor: SimulatedWorker) -> None:
        """The donor hears of it."""
        if not asked.parts:
            self._donations.pop(donor.name, None)
            self._receivers.pop(donor.name, None)
            return
        if donor.machine is None or donor.session.epoch != asked.epoch:
            return
        self._donations[donor.name] = donation = _Donation(asked, donor)
        if donor.step == asked.step:
            self._give(donation, 1.0)

    def stepped(self, donor: SimulatedWorker) -> None:
        """It has done one more step."""
        donation = self._donations.get(donor.name)
        if donation is None or donation.donor is not donor or donor.step < donation.asked.step:
            return
        first = donor.step == donation.asked.step
        now_s = self._world.clock.now_s
        if not first and self._through_s[donor.name] - now_s > MOST_BACKLOG * self._copy_s[donor.name]:
            del self._donations[donor.name]
            ended = TransferEnded(number=donation.asked.number, epoch=donation.asked.epoch)
            self._world.say(donor, ended)
            return
        self._give(donation, 1.0 if first else GRADIENTS_SHARE)

    def _give(self, donation: _Donation, share: float) -> None:
        """`share`: of the bytes of the state."""
        donor, asked = donation.donor, donation.asked
        now_s = through_s = self._world.clock.now_s
        state, step = donor.state_after(donor.step, asked.parts), donor.step
        for device, parts in self._receivers.get(donor.name, ()):
            values = {part: value for part, value in state.items() if part in parts}
            arrived_s = self._world.state_arrives_s(donor, device_of(device), values, share)
            if arrived_s is None:
                timeout_s = self._world.timeout_s
                self._world.later(timeout_s, ("follow", device, donor.name), partial(self._lose, donation, device))
                continue
            through_s = max(through_s, arrived_s)
            arrive = partial(self._arrive, donation, device, step, values)
            self._world.clock.at(arrived_s, ("follow", device, donor.name), arrive)
        self._through_s[donor.name] = through_s
        self._copy_s.setdefault(donor.name, through_s - now_s)

    def _lose(self, donation: _Donation, device: str) -> None:
        """Nothing comes any more."""
        if (joiner := self._world.worker(device)) is not None:
            ended = TransferEnded(number=donation.asked.number, epoch=donation.asked.epoch)
            self._world.on(joiner.device, lambda: self._world.say(joiner, ended))

    def _arrive(self, donation: _Donation, device: str, step: int, values: State) -> None:
        asked, donor = donation.asked, donation.donor.name
        joiner = self._world.worker(device)
        if joiner is None:
            return

        def received() -> None:
            joiner.session.kept(asked.epoch, step, values)
            told = StateReceived(of=donor, step=step, number=asked.number, epoch=asked.epoch)
            self._world.say(joiner, told)

        self._world.on(joiner.device, received)
