"""A simulated device: its workers, and the compute lane that they share. The machines of a real one decide.

A worker has a `DeviceSession`, and while it has a stage a `Worker`. What takes time, and what crosses a link, is for
the surroundings to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from isthmus.protocol.compute_lane import ComputeLane
from isthmus.protocol.device_session import DeviceSession
from isthmus.protocol.events import (
    Collect,
    Collected,
    Compute,
    Computed,
    Fill,
    Filled,
    KeepSnapshot,
    Leave,
    Merge,
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
from isthmus.protocol.run_messages import (
    Arrived,
    DeviceReady,
    DeviceReport,
    Halt,
    Inventory,
    OpenItem,
    PartsArrived,
    SnapshotCopied,
)
from isthmus.protocol.work import Item
from isthmus.protocol.worker import Worker
from isthmus.simulator.epoch import Epoch
from isthmus.simulator.history import HistoryEntry, State, after, updated

Act = Callable[[], None]
KEPT_ITEMS = 1000


class Surroundings(Protocol):
    """How a worker reaches others, and how long things take."""

    def occupy(self, worker: SimulatedWorker, name: str, seconds: float, done: WorkerEvent) -> None:
        """Hold the compute lane of the worker's device, as soon as it is free, and then say that it is done."""
        ...

    def at_once(self, worker: SimulatedWorker, act: Act) -> None:
        """After whatever else happens at this moment."""
        ...

    def transmit(self, worker: SimulatedWorker, send: Send | SendParts, item: Item, arrived: WorkerEvent) -> None: ...

    def connect(self, worker: SimulatedWorker, connected: Act) -> None: ...

    def start(self, worker: SimulatedWorker, own: frozenset[str], started: Act) -> None: ...

    def say(self, worker: SimulatedWorker, body: DeviceReport) -> None:
        """To the coordinator."""
        ...

    def give(self, worker: SimulatedWorker, epoch: int, values: State) -> None: ...

    def kept(self, worker: SimulatedWorker, step: int, values: State) -> None:
        """A snapshot is in the worker's memory: its copy may go to another one."""
        ...

    def report(self, worker: SimulatedWorker, item: Item, saved: State) -> None: ...

    def stepped(self, worker: SimulatedWorker) -> None: ...

    def left(self, worker: SimulatedWorker) -> None: ...


class SimulatedDevice:
    """One that runs. It is made anew when its process starts again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lane = ComputeLane()
        self.workers: dict[str, SimulatedWorker] = {}
        self.died_s = math.inf
        self.waiting: list[Act] | None = None
        """Actions that follow once it goes on, while it is silent."""


class SimulatedWorker:
    def __init__(self, name: str, device: SimulatedDevice, around: Surroundings) -> None:
        self.name = name
        self.device = device
        self.session: DeviceSession[HistoryEntry | None] = DeviceSession()
        self.session.port = self
        self.epoch: Epoch | None = None
        """The plan epoch of its stage."""
        self.number = -1
        """In that epoch's plan."""
        self.machine: Worker | None = None
        self.live: State = {}
        self.step = 0
        """How many updates its state has had."""
        self.placed: State = {}
        self._around = around
        self._items: dict[int, Item] = {}
        self._first_samples: dict[int, int] = {}
        """The first sample of each item, of all replicas."""
        self._saved: State = {}

    def assigned(self, epoch: Epoch) -> None:
        self.epoch, self.number = epoch, epoch.number[self.name]

    def handle(self, event: WorkerEvent) -> None:
        machine = self.machine
        if machine is None:
            return
        if isinstance(event, OpenItem) and event.epoch == machine.epoch:
            assert self.epoch is not None, "a stage has an epoch"
            self._first_samples[event.item.index] = event.item.first_sample
            event = OpenItem(item=self.epoch.shares[self.number].part(event.item), epoch=event.epoch)
            self._items[event.item.index] = event.item
        for instruction in machine.handle(event):
            self._carry_out(instruction, machine)

    def item(self, index: int) -> Item:
        return self._items[index]

    def tell(self, machine: Worker, event: WorkerEvent) -> None:
        """Unless the stage was closed meanwhile."""
        if self.machine is machine:
            self.handle(event)

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

    def give(self, epoch: int, values: State) -> None:
        self._around.give(self, epoch, values)

    def leave(self) -> None:
        if self.machine is not None:
            self.handle(Halt())
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
        self.machine = Worker(self.epoch.views[self.number], epoch)
        self.session.started(epoch)

    # The worker's instructions

    def _carry_out(self, instruction: WorkerInstruction, machine: Worker) -> None:
        around, epoch = self._around, self.epoch
        assert epoch is not None, "a stage has an epoch"
        match instruction:
            case Compute(work=work, item=item, micro_batch=number):
                done = Computed(work=work, item=item, micro_batch=number)
                around.occupy(self, work, epoch.costs.tasklet_s(self.number, work), done)
            case Send():
                arrived = Arrived(
                    parcel=instruction.parcel,
                    source=self.number,
                    item=instruction.item,
                    micro_batch=instruction.micro_batch,
                    epoch=machine.epoch,
                )
                around.transmit(self, instruction, self._items[instruction.item], arrived)
            case SendParts(group=group, round=turn, item=item):
                parts = PartsArrived(group=group, round=turn, source=self.number, item=item, epoch=machine.epoch)
                around.transmit(self, instruction, self._items[item], parts)
            case Merge():  # adding what has arrived is charged to nobody
                pass
            case Fill(item=item):
                self._at_once(machine, Filled(item=item))
            case Take(item=item):
                self._at_once(machine, Taken(item=item))
            case Collect(item=item):
                self._at_once(machine, Collected(item=item))
            case Update(item=item):
                around.occupy(self, "update", epoch.costs.update_s(self.number), Updated(item=item))
            case Save(item=item):
                self._saved = dict(self.live)
                around.occupy(self, "save", epoch.costs.save_s, Saved(item=item))
            case KeepSnapshot(item=item):
                self._keep(self._items[item].step, machine)
                self._at_once(machine, SnapshotKept(item=item))
            case Report(item=item):
                saved, self._saved = self._saved, {}
                self._items.pop(item - KEPT_ITEMS, None)  # a sum may still be sent some steps later
                around.report(self, self._items[item], saved)
            case Leave():
                pass

    def done(self, machine: Worker, event: WorkerEvent) -> None:
        """The compute lane has done what it was at."""
        if self.machine is not machine:
            return
        if isinstance(event, Updated):
            item = self._items[event.item]
            self.live = updated(self.live, self._first_samples.pop(event.item), machine.epoch)
            self.step = item.step + 1
            self._around.stepped(self)
        self.handle(event)

    def state_after(self, step: int, parts: frozenset[str]) -> State:
        return after(self.live, step, parts)

    def _at_once(self, machine: Worker, event: WorkerEvent) -> None:
        self._around.at_once(self, partial(self.tell, machine, event))

    def _keep(self, step: int, machine: Worker) -> None:
        values = dict(self.live)
        self.session.kept(machine.epoch, step, values)
        self._around.kept(self, step, values)
