"""A simulated device: its workers, and the compute lane that they share. The policies of a real one decide.

A worker has a `DeviceSession`, and while it has a stage a `Worker`: it is the port of both. What takes time, and what
crosses a link, is for the surroundings to say.

The weights of a simulated run are the list of the updates made to them. A check says which lists are right.

Every part of the model goes through the same updates: each range of samples once and in order, and none of an epoch's
line that ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from isthmus.errors import InternalError
from isthmus.protocol.device_session import DeviceSession
from isthmus.protocol.recovery import Lineage
from isthmus.protocol.run_messages import (
    Arrived,
    DeviceReady,
    DeviceReport,
    Inventory,
    Item,
    OpenItem,
    Parcel,
    PartsArrived,
    SnapshotCopied,
    StateMissing,
    Work,
)
from isthmus.protocol.worker import Worker
from isthmus.simulator.epoch import Costs, Epoch
from isthmus.simulator.parties import Act, Party


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
