"""The worker: what one stage does next. It knows no clock, socket, thread or tensor.

The life of a training item on one stage, with what must have arrived before each step:

    shared values of shared parameters of other stages ─┐
    activations of micro-batch m ─────────┴─► F(m) ─► send activations
    gradients of micro-batch m ─────────────► B(m) ─► send gradients ─► (W(m), the weight gradients)
    all B and W done ─► send gradients of shared parameters of other stages
    their users' gradients, the loss count ─► (sum gradients with other replicas) ─► collect ─► send norms
    everyone's norms ─► update ─► (or average parameters with other replicas) ─► report ─► next item

Its phases:

    step        idle ─► tasklets ─► gathering ─► (sum) ─► collecting ─► clipping ─► updating ─► (average) ─► idle
    evaluation  idle ─► tasklets ─► idle
    checkpoint  idle ─► settling ─► saving ─► idle
    snapshot    idle ─► settling ─► keeping ─► idle

A sum with other replicas, which is an average of parameters: filling ─► averaging (see `Exchange`) ─► taking. With a
delay the exchange goes on while the next items compute:

    step t:          update ─► take the sums begun in step t - delay ─► fill ─► report
    step t + delay:  update ─► take the sums begun in step t ─► ...

The compute lane does one thing at a time. Whenever it is idle the ready tasklet of highest priority starts:
backward, forward, weight gradients; of one kind the lowest micro-batch. A late parcel delays only what depends on it.

A stage of the `delayed` schedule computes step t at the weights that step t - 2 left (`plans.schedule`). So whenever
nothing of step t is ready, tasklets of step t + 1 are done: the update of step t - 1 is all that they need.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from isthmus.errors import InternalError
from isthmus.plans import Averages
from isthmus.plans.collective import Round
from isthmus.plans.schedule import feeder_slot
from isthmus.protocol.run_messages import Arrived, Item, Parcel, PartsArrived, Work
from isthmus.session.program import OVER, OutOfPhase, Policy
from isthmus.wire_types import Count, Many, Place


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group from one member's side. In its rounds the others are workers' numbers."""

    group: Place
    rounds: Many[Round]
    iterations: Many[Count] = (0,)  # in which steps of a period it is summed


class PartsPort(Protocol):
    """An exchange asks this of its host."""

    def send_parts(self, group: int, turn: int, target: int, item: int) -> None:
        """Send worker `target` its parts of a group's buffer in this round."""

    def merge(self, group: int, turn: int, item: int) -> None:
        """All parts of the round are here: add them to the group's buffer, or put them in their places."""


class Exchange:
    """The sums that one worker makes with workers of other replicas: which parts leave, and when a sum is complete.

        start ─► round 0: send, wait, merge ─► round 1: send, wait, merge ─► ... ─► summed

    Each of the worker's groups goes through its own rounds; what arrives early waits. Items do not mix, whatever the
    order of arrivals, and sums of several may be on the way at once; of one group only one.
    """

    def __init__(self, groups: Sequence[GroupView], port: PartsPort) -> None:
        self._port = port
        self._rounds = {g.group: g.rounds for g in groups}
        self._at: dict[int, int] = {}  # groups at work: in which round each is
        self._items: dict[int, int] = {}  # for which item
        self._arrived: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
        """The members that have sent, by (item, group, round)."""

    @property
    def busy(self) -> bool:
        return bool(self._at)

    def summed(self, groups: Collection[int]) -> bool:
        """Return whether all that was started of these groups is complete."""
        return self._at.keys().isdisjoint(groups)

    def start(self, item: int, groups: Collection[int]) -> None:
        """This worker's buffers of these groups are filled."""
        assert self.summed(groups), "a group's next sum starts when its last was taken"
        for group in groups:
            self._at[group], self._items[group] = -1, item
            self._next(group)
            self._advance(group)

    def arrived(self, body: PartsArrived) -> None:
        """Parts are here, perhaps for a round or an item that this worker has not come to."""
        self._arrived[body.item, body.group, body.round].add(body.source)
        if body.group in self._at and body.item == self._items[body.group]:
            self._advance(body.group)

    def _advance(self, group: int) -> None:
        while group in self._at:
            number, item = self._at[group], self._items[group]
            due = self._rounds[group][number].receives
            if not self._arrived[item, group, number].issuperset(m.other for m in due):
                return
            del self._arrived[item, group, number]
            if due:
                self._port.merge(group, number, item)
            self._next(group)

    def _next(self, group: int) -> None:
        number = self._at[group] + 1
        if number == len(self._rounds[group]):
            del self._at[group]
            return
        self._at[group] = number
        for message in self._rounds[group][number].sends:
            self._port.send_parts(group, number, message.other, self._items[group])


class Feeding(msgspec.Struct, frozen=True, kw_only=True):
    """Pure: all devices tell the same from the same counts."""

    train: Many[Count]  # samples of each holder
    heldout: Many[Count]  # whole micro-batches of each holder's held-out samples
    micro_batch_size: Count
    copies: Many[Many[Place]]
    """Workers that run copies of one stage, in the order of the holders; for each stage that has copies."""

    def does(self, worker: int, item: Item, micro_batch: int) -> bool:
        """Return whether a worker has to do with a micro-batch of an item: who runs no copy has to do with all."""
        own = next((copies for copies in self.copies if worker in copies), None)
        return own is None or own[self.holder(item, micro_batch)] == worker

    def holder(self, item: Item, micro_batch: int) -> int:
        """Return whose micro-batch of an item it is: the number of the holder."""
        number = item.first_sample // self.micro_batch_size + micro_batch
        return feeder_slot(self.train if item.kind == "train" else self.heldout, number).holder

    def present(self, workers: tuple[int, ...], item: Item, micro_batch: int) -> tuple[int, ...]:
        """Those of some workers that have to do with a micro-batch."""
        return tuple(worker for worker in workers if self.does(worker, item, micro_batch))


_COMPUTING = ("tasklets", "gathering", "averaging", "clipping", "settling")
"""Phases in which a tasklet may end: one of the next step in every phase that waits (`delayed`)."""
_NOBODY: frozenset[int] = frozenset()


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """The neighbours and the limits of a worker's stage.

    Stages are numbered through all replicas, so a number names one worker.
    """

    stage: Place
    stages: Place  # stages of its replica
    first: Place = 0  # its replica's first
    in_flight: Count  # micro-batches that may be between their forward and the end of their backward here
    splits: bool = False  # weight gradients are computed apart, behind the backward
    forward_from: Many[Place]
    forward_to: Many[Place]
    backward_from: Many[Place]
    backward_to: Many[Place]
    eval_from: Many[Place] = ()
    eval_to: Many[Place] = ()
    parameter_users: Many[Place] = ()  # stages that use parameters that this one owns
    parameter_owners: Many[Place] = ()
    trains: bool = True  # whether this stage has a backward pass at all
    has_loss: bool = False
    losses: Place = 1  # workers of its replica that have the loss: several, where that stage has copies
    counts: bool = False  # the loss is a sum over a count that only the loss's stage knows
    clips: bool = False  # gradients are clipped by the norm of the whole model
    skips: bool = False  # where gradients of any stage of its replica are not finite, all leave the update out
    groups: Many[GroupView] = ()  # sums with workers of other replicas
    averages: Averages = "gradients"
    delay: Count = 0  # steps between the start of a sum and its use
    period: Count = 1  # steps after which the groups' iterations start again
    feeding: Feeding | None = None  # where several holders feed the chain: who does which micro-batches
    delayed: bool = False  # whether the next step's tasklets may be done before this step's update

    def of(self, workers: tuple[int, ...], item: Item, micro_batch: int) -> tuple[int, ...]:
        """Those of some neighbours that work on a micro-batch: of copies of one stage, the one whose turn it is."""
        return workers if self.feeding is None else self.feeding.present(workers, item, micro_batch)

    def own(self, item: Item) -> Sequence[int]:
        """The micro-batches of an item that this stage works on."""
        every = range(item.micro_batches)
        return every if self.feeding is None else [m for m in every if self.feeding.does(self.stage, item, m)]

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(s for s in range(self.first, self.first + self.stages) if s != self.stage)

    @property
    def agrees(self) -> bool:
        """Return whether gradient norms are exchanged before the update."""
        return self.clips or self.skips

    @property
    def partners(self) -> frozenset[int]:
        """Workers of other replicas with which it exchanges parts."""
        rounds = (r for group in self.groups for r in group.rounds)
        return frozenset(m.other for r in rounds for m in (*r.sends, *r.receives))


class _Tasklets:
    """An item's tasklets on this stage, and how many of them are begun or done."""

    def __init__(self, item: Item, own: Sequence[int]) -> None:
        self.item, self.own = item, own
        self.forwards = self.backwards = 0
        self.waiting: list[int] = []
        """Micro-batches between their forward and their backward, in the order of their forwards."""
        self.weights: deque[int] = deque()  # their backward is done but for the weight gradients

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.weights)

    @property
    def done(self) -> bool:
        return (self.forwards if self.item.kind == "eval" else self.backwards) == len(self.own)


class WorkerStatistics(msgspec.Struct, frozen=True):
    phase: str
    item: int  # the item in work, or the last one finished
    forwards: int
    backwards: int
    stale: int  # arrivals of another plan epoch, dropped


class StagePort(PartsPort, Protocol):
    """A worker asks this of its host. The end of what occupies the compute lane is another call of the worker, later:
    `computed`, `filled`, `taken`, `collected`, `updated`, `saved`, `kept`."""

    def compute(self, work: Work, item: int, micro_batch: int) -> None:
        """Run a tasklet."""

    def send(self, parcel: Parcel, target: int, item: int, micro_batch: int = -1) -> None: ...

    def fill(self, item: int, groups: tuple[int, ...]) -> None:
        """Fill the buffers of these groups: with summed gradients, or with weighted parameters or deltas."""

    def take(self, item: int, groups: tuple[int, ...]) -> None:
        """Use the sums in the buffers of these groups."""

    def collect(self, item: int) -> None:
        """Scale the summed gradients, add those of shared parameters, compute norms."""

    def update(self, item: int, *, skip: bool) -> None:
        """Apply the optimizers (clipped, if norms were exchanged). `skip`: drop the gradients instead, which are not
        finite on some stage of the replica."""

    def save(self, item: int) -> None:
        """Write this stage's part of a checkpoint."""

    def keep(self, item: int) -> None:
        """Copy this stage's state in memory: its part of a snapshot."""

    def report(self, item: int) -> None:
        """Tell the coordinator that the item is done here, with this stage's loss if it has one."""


class Worker(Policy[StagePort]):
    """The policy of one stage. A method makes at most one call that occupies the compute lane, as its last one."""

    def __init__(self, view: StageView, port: StagePort, epoch: int = 0) -> None:
        super().__init__("idle")
        self.view, self.port, self.epoch = view, port, epoch
        self._leases: deque[Item] = deque()
        self._item: Item | None = None
        self._tasklets: dict[int, _Tasklets] = {}
        """Tasks of the item in work, and of the step after it where that is begun."""
        self._last = -1
        self._busy = False
        self._arrived: dict[tuple[Parcel, int, int], set[int]] = {}
        self._not_finite: set[int] = set()  # items of which a stage said so
        self._exchange = Exchange(view.groups, port)
        self._awaited: tuple[int, ...] = ()  # the groups whose sums are to be taken next

    def statistics(self) -> WorkerStatistics:
        item = self._item.index if self._item else self._last
        own = self._tasklets.get(item)
        forwards, backwards = (own.forwards, own.backwards) if own is not None else (0, 0)
        return WorkerStatistics(self.phase, item, forwards, backwards, self.stale)

    # What others cause

    def opened(self, item: Item, epoch: int) -> None:
        """The coordinator leases an item: of several replicas this one's part of it."""
        if not self._is_late(epoch):
            self._leases.append(item)
            self._go_on()

    def arrived(self, body: Arrived | PartsArrived) -> None:
        if self._is_late(body.epoch):
            return
        if isinstance(body, PartsArrived):
            self._exchange.arrived(body)
        else:
            self._arrived.setdefault((body.parcel, body.item, body.micro_batch), set()).add(body.source)
            if not body.finite:
                self._not_finite.add(body.item)
        self._go_on()

    def halt(self) -> None:
        """The run is over for this stage."""
        self.phase = OVER

    # The ends of what occupied the compute lane

    def computed(self, work: Work, item: int, micro_batch: int) -> None:
        if self.over:
            return
        if self.phase not in _COMPUTING:
            raise OutOfPhase(f"computed came in phase {self.phase!r}")
        own = self._tasklets[item]
        self._busy = False
        if work == "F":
            self._forward_done(own, micro_batch)
        elif work == "W":
            own.backwards += 1
        elif work == "B":
            if self.view.splits:
                own.weights.append(micro_batch)
            else:
                own.backwards += 1
            self._send("backward", self.view.backward_to, own.item, micro_batch)
        else:
            self._send("forward", self.view.eval_to, own.item, micro_batch)
        self._go_on()

    def filled(self, item: int) -> None:
        """The buffers of the item's groups hold what this worker adds to their sums."""
        if self._ended("filling", item):
            self._awaited = self._due()
            if not self.view.delay:
                self.phase = "averaging"
            self._exchange.start(item, self._awaited)
            if self.view.delay:
                self._finish(item)
            self._go_on()

    def taken(self, item: int) -> None:
        """The sums are where the engine uses them."""
        if self._ended("taking", item):
            if self.view.averages == "gradients":
                self._occupy("collecting")
                self.port.collect(item)
            elif self.view.delay:
                self._exchange_or_finish(item)
            else:
                self._finish(item)
            self._go_on()

    def collected(self, item: int, *, finite: bool = True) -> None:
        """The item's gradients are final on this stage and their norms known. `finite`: they are, and the loss if this
        stage has it."""
        if self._ended("collecting", item):
            self.phase = "clipping"
            if not finite:
                self._not_finite.add(item)
            if self.view.agrees:
                for other in self.view.others:
                    self.port.send("norms", other, item)
            self._go_on()

    def updated(self, item: int) -> None:
        if self._ended("updating", item):
            if self.view.averages == "gradients":
                self._finish(item)
            elif self.view.delay and (begun := self._due(self.view.delay)):
                self.phase, self._awaited = "averaging", begun
            else:
                self._exchange_or_finish(item)
            self._go_on()

    def saved(self, item: int) -> None:
        if self._ended("saving", item):
            self._finish(item)
            self._go_on()

    def kept(self, item: int) -> None:
        """A copy of the stage's state is in memory."""
        if self._ended("keeping", item):
            self._finish(item)
            self._go_on()

    # What it may be asked

    @property
    def settled(self) -> bool:
        """Return whether no item is in work here, and no sum on its way."""
        return self.phase == "idle" and not self._exchange.busy

    def is_recoverable(self, steps: int, *, buffers: bool = False) -> bool:
        """Return whether the stage's state, `steps` steps old, is one that another plan may go on from.

        Within a period of averages a replica's state is nobody else's: who went on from it would lose what the others
        learned. Before they are averaged, parameters are not the replicas' own; `buffers` that forwards change are of
        a whole step only where no item is in work, or where they are kept from before the next step.
        """
        averaged = self.view.averages != "gradients"
        if averaged and steps % self.view.period:
            return False
        return self.settled or not (averaged or (buffers and not self.view.delayed))

    # What it does next

    def _is_late(self, epoch: int) -> bool:
        self.stale += epoch != self.epoch
        return epoch != self.epoch or self.over

    def _ended(self, phase: str, item: int) -> bool:
        """The compute lane is free again, and the worker idle for now; False when it is over."""
        if self.over:
            return False
        if self.phase != phase:
            raise OutOfPhase(f"the end of {phase!r} came in phase {self.phase!r}")
        if item != self._index:
            raise InternalError(f"stage {self.view.stage}: the end of {phase!r} of item {item}, expected {self._index}")
        self._busy, self.phase = False, "idle"
        return True

    def _forward_done(self, own: _Tasklets, micro_batch: int) -> None:
        if self.view.trains:
            own.waiting.append(micro_batch)
        else:
            own.backwards += 1
        self._send("forward", self.view.forward_to, own.item, micro_batch)
        self._counted(own)

    def _send(self, parcel: Parcel, workers: tuple[int, ...], item: Item, micro_batch: int) -> None:
        for target in self.view.of(workers, item, micro_batch):
            self.port.send(parcel, target, item.index, micro_batch)

    def _counted(self, own: _Tasklets) -> None:
        """Send the count of the loss, once the last forward of a step is done here."""
        if self.view.counts and self.view.has_loss and own.forwards == len(own.own):
            for other in self.view.others:
                self.port.send("count", other, own.item.index)

    def _exchange_or_finish(self, item: int) -> None:
        if due := self._due():
            self._occupy("filling")
            self.port.fill(item, due)
        else:
            self._finish(item)

    def _due(self, steps_ago: int = 0) -> tuple[int, ...]:
        """Groups whose sums start in the item's step, or did so many steps ago: also before the run was resumed."""
        assert self._item is not None, "sums belong to an item"
        step = self._item.step - steps_ago
        iteration = step % self.view.period
        return tuple(g.group for g in self.view.groups if step >= 0 and iteration in g.iterations)

    def _go_on(self) -> None:
        """Move on as far as what has arrived allows, until the compute lane has something to do."""
        if self._busy:
            return
        if self.phase == "idle" and self._leases:
            self._begin(self._leases.popleft())
        if self.phase == "tasklets":
            self._pick()
        if self.phase == "gathering" and not self._busy and self._gathered():
            self._sum_or_collect()
        if self.phase == "averaging" and self._exchange.summed(self._awaited):
            self._occupy("taking")
            self.port.take(self._index, self._awaited)
        if self.phase == "settling" and not self._exchange.busy:
            self._settled()
        if self.phase == "clipping" and (not self.view.agrees or self._has("norms", self._index, self.view.others)):
            skip = self.view.skips and self._index in self._not_finite
            self._occupy("updating")
            self.port.update(self._index, skip=skip)
        if self.view.delayed and not self._busy:
            self._work_ahead()

    def _sum_or_collect(self) -> None:
        due = self._due() if self.view.averages == "gradients" else ()
        if due:
            self._occupy("filling")
            self.port.fill(self._index, due)
        else:
            self._occupy("collecting")
            self.port.collect(self._index)

    def _settled(self) -> None:
        assert self._item is not None, "only an item settles"
        if self._item.kind == "save":
            self._occupy("saving")
            self.port.save(self._index)
        else:
            self._occupy("keeping")
            self.port.keep(self._index)

    @property
    def _index(self) -> int:
        assert self._item is not None, "only a stage at work has an item"
        return self._item.index

    def _begin(self, item: Item) -> None:
        self._item = item
        if item.kind in ("save", "keep"):
            self.phase = "settling"  # sums that are on the way are kept too, once they are complete
            return
        self.phase = "tasklets"
        if item.index not in self._tasklets:
            self._open(item)

    def _open(self, item: Item) -> None:
        own = self._tasklets[item.index] = _Tasklets(item, self.view.own(item))
        for user in self.view.parameter_users:
            self.port.send("shared", user, item.index)
        if item.kind == "train" and not own.own:
            self._counted(own)

    def _work_ahead(self) -> None:
        """Do a tasklet of the next step, whose weights are those before this step's update. An evaluation in between is
        waited for: it is at the weights after it."""
        later = next((item for item in self._leases if item.kind not in ("save", "keep")), None)
        if self._item is None or later is None or later.kind == "eval" or self._item.kind == "eval":
            return
        if later.index not in self._tasklets:
            self._open(later)
        self._start_tasklet(self._tasklets[later.index])

    def _occupy(self, phase: str) -> None:
        """The next call of the port occupies the compute lane."""
        self.phase, self._busy = phase, True

    def _pick(self) -> None:
        """Start the best ready tasklet, or leave the phase when there are none left."""
        own = self._tasklets[self._index]
        if not own.done:
            self._start_tasklet(own)
        elif own.item.kind == "eval":
            self.phase = "idle"
            self._finish(own.item.index)
            self._go_on()
        else:
            self.phase = "gathering"
            for owner in self.view.parameter_owners:
                self.port.send("shared_gradient", owner, own.item.index)

    def _start_tasklet(self, own: _Tasklets) -> None:
        """The best that is ready, if any is."""
        item = own.item
        if (micro_batch := self._ready_backward(own)) is not None:
            own.waiting.remove(micro_batch)
            self._busy = True
            self.port.compute("B", item.index, micro_batch)
        elif self._forward_ready(own):
            micro_batch = own.own[own.forwards]
            own.forwards += 1
            self._busy = True
            self.port.compute("F" if item.kind == "train" else "E", item.index, micro_batch)
        elif own.weights:
            self._busy = True
            self.port.compute("W", item.index, own.weights.popleft())

    def _ready_backward(self, own: _Tasklets) -> int | None:
        """The lowest micro-batch: they wait in the order of their forwards."""
        view = self.view
        for m in own.waiting:
            if self._has("backward", own.item.index, view.of(view.backward_from, own.item, m), m):
                return m
        return None

    def _forward_ready(self, own: _Tasklets) -> bool:
        item, train, view = own.item, own.item.kind == "train", self.view
        if own.forwards == len(own.own):
            return False
        if any(other.forwards < len(other.own) for other in self._tasklets.values() if other.item.index < item.index):
            return False  # forwards go in the order of the data
        if train and sum(other.in_flight for other in self._tasklets.values()) >= view.in_flight:
            return False
        micro_batch = own.own[own.forwards]
        sources = view.of(view.forward_from if train else view.eval_from, item, micro_batch)
        return self._has("shared", item.index, view.parameter_owners) and self._has(
            "forward", item.index, sources, micro_batch
        )

    def _gathered(self) -> bool:
        due = self.view.losses - self.view.has_loss if self.view.counts else 0
        count_here = len(self._arrived.get(("count", self._index, -1), ())) >= due
        return count_here and self._has("shared_gradient", self._index, self.view.parameter_users)

    def _has(self, parcel: Parcel, item: int, sources: tuple[int, ...], micro_batch: int = -1) -> bool:
        return not sources or self._arrived.get((parcel, item, micro_batch), _NOBODY).issuperset(sources)

    def _finish(self, item: int) -> None:
        self._last = item
        self._item = None
        self._tasklets.pop(item, None)
        self._arrived = {key: sources for key, sources in self._arrived.items() if key[1] > item}
        self._not_finite = {other for other in self._not_finite if other > item}
        self.port.report(item)
