"""The worker: what one stage does next. Events in, instructions out; no clock, socket, thread or tensor.

The life of a training item on one stage, with what must have arrived before each step:

    shared values of shared parameters of other stages ─┐
    activations of micro-batch m ─────────┴─► F(m) ─► send activations
    gradients of micro-batch m ─────────────► B(m) ─► send gradients ─► (W(m), the weight gradients)
    all B and W done ─► send gradients of shared parameters of other stages
    their users' gradients, the loss count ─► (sum gradients with other replicas) ─► collect ─► send norms
    everyone's norms ─► update ─► (or average parameters with other replicas) ─► report ─► next item

A sum with other replicas: fill the buffers ─► exchange (see `exchange`) ─► take the sums. With a delay the exchange
goes on while the next items compute:

    step t:          update ─► take the sums begun in step t - delay ─► fill ─► report
    step t + delay:  update ─► take the sums begun in step t ─► ...

The compute lane does one thing at a time. Whenever it is idle the ready tasklet of highest priority starts:
backward, forward, weight gradients; of one kind the lowest micro-batch. A late parcel delays only what depends on it.

A stage of the `delayed` schedule computes step t at the weights that step t - 2 left (`plans.schedule`). So whenever
nothing of step t is ready, tasklets of step t + 1 are done: the update of step t - 1 is all that they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from isthmus.errors import InternalError
from isthmus.plans import Averages
from isthmus.protocol.events import (
    Collect,
    Collected,
    Compute,
    Computed,
    Fill,
    Filled,
    KeepSnapshot,
    Leave,
    Report,
    Save,
    Saved,
    Send,
    SnapshotKept,
    Take,
    Taken,
    Update,
    Updated,
    Work,
    WorkerEvent,
    WorkerInstruction,
)
from isthmus.protocol.exchange import Exchange, GroupView
from isthmus.protocol.feeding import Feeding
from isthmus.protocol.machine import EpochMachine
from isthmus.protocol.run_messages import Arrived, Halt, OpenItem, Parcel, PartsArrived
from isthmus.protocol.work import Item
from isthmus.protocol.worker_phases import WORKER, Phase, WorkerStatistics
from isthmus.wire_types import Count, Many, Place

_OF_OTHERS = (OpenItem, Arrived, PartsArrived)
"""Events that other machines cause. The rest are ends of this worker's own instructions."""
_NOBODY: frozenset[int] = frozenset()


class StageView(msgspec.Struct, frozen=True, kw_only=True):
    """The neighbours and the limits of a worker's stage.

    Stages are numbered through all replicas, so a number names one worker.
    """

    stage: Place
    stages: Place
    """Stages of its replica."""
    first: Place = 0
    """Its replica's first."""
    in_flight: Count
    """Micro-batches that may be between their forward and the end of their backward here."""
    splits: bool = False
    """Weight gradients are computed apart, behind the backward."""
    forward_from: Many[Place]
    forward_to: Many[Place]
    backward_from: Many[Place]
    backward_to: Many[Place]
    eval_from: Many[Place] = ()
    eval_to: Many[Place] = ()
    parameter_users: Many[Place] = ()
    """Stages that use parameters that this one owns."""
    parameter_owners: Many[Place] = ()
    trains: bool = True
    """Whether this stage has a backward pass at all."""
    has_loss: bool = False
    losses: Place = 1
    """Workers of its replica that have the loss: several, where that stage has copies."""
    counts: bool = False
    """The loss is a sum over a count that only the loss's stage knows."""
    clips: bool = False
    """Gradients are clipped by the norm of the whole model."""
    skips: bool = False
    """Where gradients of any stage of its replica are not finite, all leave the update out."""
    groups: Many[GroupView] = ()
    """Sums with workers of other replicas."""
    averages: Averages = "gradients"
    delay: Count = 0
    """Steps between the start of a sum and its use."""
    period: Count = 1
    """Steps after which the groups' iterations start again."""
    feeding: Feeding | None = None
    """Where several holders feed the chain: who does which micro-batches."""
    delayed: bool = False
    """Whether the next step's tasklets may be done before this step's update."""

    def of(self, workers: tuple[int, ...], item: Item, micro_batch: int) -> tuple[int, ...]:
        """Those of some neighbours that work on a micro-batch: of copies of one stage, the one whose turn it is."""
        return workers if self.feeding is None else self.feeding.present(workers, item, micro_batch)

    def own(self, item: Item) -> Sequence[int]:
        """The micro-batches of an item that this stage works on."""
        every = range(item.micro_batches)
        return every if self.feeding is None else [m for m in every if self.feeding.does(self.stage, item, m)]

    @property
    def others(self) -> tuple[int, ...]:
        """The other stages of its replica."""
        return tuple(s for s in range(self.first, self.first + self.stages) if s != self.stage)

    @property
    def agrees(self) -> bool:
        """Whether gradient norms are exchanged before the update."""
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
        self.weights: deque[int] = deque()
        """Their backward is done but for the weight gradients."""

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.weights)

    @property
    def done(self) -> bool:
        return (self.forwards if self.item.kind == "eval" else self.backwards) == len(self.own)


class Worker(EpochMachine[Phase, WorkerEvent, WorkerInstruction]):
    """The state machine of one stage. At most one of the instructions that an event leads to occupies the compute
    lane."""

    transitions = WORKER

    def __init__(self, view: StageView, epoch: int = 0) -> None:
        super().__init__(epoch)
        self.view = view
        self._leases: deque[Item] = deque()
        self._item: Item | None = None
        self._tasklets: dict[int, _Tasklets] = {}
        """Tasks of the item in work, and of the step after it where that is begun."""
        self._last = -1
        self._busy = False
        self._arrived: dict[tuple[Parcel, int, int], set[int]] = {}
        self._not_finite: set[int] = set()
        """Items of which a stage said so."""
        self._exchange = Exchange(view.groups)
        self._awaited: tuple[int, ...] = ()
        """The groups whose sums are to be taken next."""

    def statistics(self) -> WorkerStatistics:
        item = self._item.index if self._item else self._last
        own = self._tasklets.get(item)
        forwards, backwards = (own.forwards, own.backwards) if own is not None else (0, 0)
        return WorkerStatistics(self._phase, item, forwards, backwards, self._stale)

    def _is_stale(self, event: WorkerEvent) -> bool:
        """Ends of its own instructions are always of its own epoch."""
        return event.epoch != self._epoch and isinstance(event, _OF_OTHERS)

    def _take(self, event: WorkerEvent) -> list[WorkerInstruction]:
        out: list[WorkerInstruction] = []
        match event:
            case OpenItem(item=item):
                self._leases.append(item)
            case Arrived(parcel=parcel, source=source, item=item, micro_batch=micro_batch):
                self._arrived.setdefault((parcel, item, micro_batch), set()).add(source)
                if not event.finite:
                    self._not_finite.add(item)
            case PartsArrived():
                out += self._exchange.arrived(event)
            case Computed(work=work, item=item, micro_batch=micro_batch):
                self._computed(work, self._tasklets[item], micro_batch, out)
            case Filled(item=item):
                self._expect("idle" if self.view.delay else "averaging", item)
                self._awaited = self._due()
                out += self._exchange.start(item, self._awaited)
                if self.view.delay:
                    self._finish(item, out)
            case Taken(item=item):
                self._expect("idle", item)
                self._taken(item, out)
            case Collected(item=item, finite=finite):
                self._expect("clipping", item)
                if not finite:
                    self._not_finite.add(item)
                if self.view.agrees:
                    out += [Send("norms", s, item) for s in self.view.others]
            case Updated(item=item):
                self._expect("idle", item)
                self._updated(item, out)
            case Saved(item=item):
                self._expect("idle", item)
                self._finish(item, out)
            case SnapshotKept(item=item):
                self._expect("idle", item)
                self._finish(item, out)
            case Halt():
                self._phase = "halted"
                return [Leave()]
        if not self._busy:
            self._advance(out)
        return out

    def _expect(self, then: Phase, item: int) -> None:
        if self._item is None or self._item.index != item:
            raise InternalError(f"stage {self.view.stage}: an event of item {item} in phase {self._phase}")
        self._busy = False
        self._phase = then

    def _computed(self, work: Work, own: _Tasklets, micro_batch: int, out: list[WorkerInstruction]) -> None:
        item, view = own.item, self.view
        self._busy = False
        if work == "F":
            if view.trains:
                own.waiting.append(micro_batch)
            else:
                own.backwards += 1
            out += [Send("forward", s, item.index, micro_batch) for s in view.of(view.forward_to, item, micro_batch)]
            self._counted(own, out)
        elif work == "W":
            own.backwards += 1
        elif work == "B":
            if view.splits:
                own.weights.append(micro_batch)
            else:
                own.backwards += 1
            out += [Send("backward", s, item.index, micro_batch) for s in view.of(view.backward_to, item, micro_batch)]
        else:
            out += [Send("forward", s, item.index, micro_batch) for s in view.of(view.eval_to, item, micro_batch)]

    def _counted(self, own: _Tasklets, out: list[WorkerInstruction]) -> None:
        """Tell the count of the loss, once the last forward of a step is done here."""
        if self.view.counts and self.view.has_loss and own.forwards == len(own.own):
            out += [Send("count", s, own.item.index) for s in self.view.others]

    def _updated(self, item: int, out: list[WorkerInstruction]) -> None:
        if self.view.averages == "gradients":
            self._finish(item, out)
        elif self.view.delay and (begun := self._due(self.view.delay)):
            self._phase, self._awaited = "averaging", begun
        else:
            self._exchange_or_finish(item, out)

    def _exchange_or_finish(self, item: int, out: list[WorkerInstruction]) -> None:
        if due := self._due():
            self._start("filling", Fill(item, due), out)
        else:
            self._finish(item, out)

    def _taken(self, item: int, out: list[WorkerInstruction]) -> None:
        if self.view.averages == "gradients":
            self._start("collecting", Collect(item), out)
        elif self.view.delay:
            self._exchange_or_finish(item, out)
        else:
            self._finish(item, out)

    def _due(self, steps_ago: int = 0) -> tuple[int, ...]:
        """Groups whose sums start in the item's step, or did so many steps ago: also before the run was resumed."""
        assert self._item is not None, "sums belong to an item"
        step = self._item.step - steps_ago
        iteration = step % self.view.period
        return tuple(g.group for g in self.view.groups if step >= 0 and iteration in g.iterations)

    def _advance(self, out: list[WorkerInstruction]) -> None:
        """Move on as far as what has arrived allows, until the compute lane has something to do."""
        if self._phase == "idle" and self._leases:
            self._begin(self._leases.popleft(), out)
        if self._phase == "tasklets":
            self._pick(out)
        if self._phase == "gathering" and not self._busy and self._gathered():
            due = self._due() if self.view.averages == "gradients" else ()
            if due:
                self._start("filling", Fill(self._index, due), out)
            else:
                self._start("collecting", Collect(self._index), out)
        if self._phase == "averaging" and self._exchange.summed(self._awaited):
            self._start("taking", Take(self._index, self._awaited), out)
        if self._phase == "settling" and not self._exchange.busy:
            self._settled(out)
        if self._phase == "clipping" and (not self.view.agrees or self._has("norms", self._index, self.view.others)):
            skip = self.view.skips and self._index in self._not_finite
            self._start("updating", Update(self._index, skip), out)
        if self.view.delayed and not self._busy:
            self._work_ahead(out)

    def _settled(self, out: list[WorkerInstruction]) -> None:
        assert self._item is not None, "only an item settles"
        if self._item.kind == "save":
            self._start("saving", Save(self._index), out)
        else:
            self._start("keeping", KeepSnapshot(self._index), out)

    @property
    def settled(self) -> bool:
        """Whether no item is in work here, and no sum on its way."""
        return self._phase == "idle" and not self._exchange.busy

    def is_recoverable(self, steps: int, *, buffers: bool = False) -> bool:
        """Whether the stage's state, `steps` steps old, is one that another plan may go on from.

        Within a period of averages a replica's state is nobody else's: who went on from it would lose what the others
        learned. Before they are averaged, parameters are not the replicas' own; `buffers` that forwards change are of
        a whole step only where no item is in work, or where they are kept from before the next step.
        """
        averaged = self.view.averages != "gradients"
        if averaged and steps % self.view.period:
            return False
        return self.settled or not (averaged or (buffers and not self.view.delayed))

    @property
    def _index(self) -> int:
        assert self._item is not None, "only a stage at work has an item"
        return self._item.index

    def _begin(self, item: Item, out: list[WorkerInstruction]) -> None:
        self._item = item
        if item.kind in ("save", "keep"):
            self._phase = "settling"  # sums that are on the way are kept too, once they are complete
            return
        self._phase = "tasklets"
        if item.index not in self._tasklets:
            self._open(item, out)

    def _open(self, item: Item, out: list[WorkerInstruction]) -> None:
        own = self._tasklets[item.index] = _Tasklets(item, self.view.own(item))
        out += [Send("shared", s, item.index) for s in self.view.parameter_users]
        if item.kind == "train" and not own.own:
            self._counted(own, out)

    def _work_ahead(self, out: list[WorkerInstruction]) -> None:
        """Do a tasklet of the next step, whose weights are those before this step's update. An evaluation in between is
        waited for: it is at the weights after it."""
        later = next((item for item in self._leases if item.kind not in ("save", "keep")), None)
        if self._item is None or later is None or later.kind == "eval" or self._item.kind == "eval":
            return
        if later.index not in self._tasklets:
            self._open(later, out)
        self._start_tasklet(self._tasklets[later.index], out)

    def _start(self, phase: Phase, instruction: WorkerInstruction, out: list[WorkerInstruction]) -> None:
        self._phase = phase
        self._busy = True
        out.append(instruction)

    def _pick(self, out: list[WorkerInstruction]) -> None:
        """Start the best ready tasklet, or leave the phase when there are none left."""
        own = self._tasklets[self._index]
        if not own.done:
            self._start_tasklet(own, out)
        elif own.item.kind == "eval":
            self._phase = "idle"
            self._finish(own.item.index, out)
            self._advance(out)
        else:
            self._phase = "gathering"
            out += [Send("shared_gradient", s, own.item.index) for s in self.view.parameter_owners]

    def _start_tasklet(self, own: _Tasklets, out: list[WorkerInstruction]) -> None:
        """The best that is ready, if any is."""
        if (micro_batch := self._ready_backward(own)) is not None:
            own.waiting.remove(micro_batch)
            self._busy = True
            out.append(Compute("B", own.item.index, micro_batch))
        elif self._forward_ready(own):
            micro_batch = own.own[own.forwards]
            own.forwards += 1
            self._busy = True
            out.append(Compute("F" if own.item.kind == "train" else "E", own.item.index, micro_batch))
        elif own.weights:
            self._busy = True
            out.append(Compute("W", own.item.index, own.weights.popleft()))

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

    def _finish(self, item: int, out: list[WorkerInstruction]) -> None:
        self._last = item
        self._item = None
        self._tasklets.pop(item, None)
        self._arrived = {key: sources for key, sources in self._arrived.items() if key[1] > item}
        self._not_finite = {other for other in self._not_finite if other > item}
        out.append(Report(item))
