"""The host of a `Worker` in a real run: its port, with an engine, links and a clock."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Generator, Mapping
from functools import partial

import torch
from torch import Tensor

from isthmus.accelerators.accelerator import DeviceClock
from isthmus.accelerators.copies import to_device
from isthmus.data import Dataset
from isthmus.errors import PeerError, StepError
from isthmus.graph import Ref
from isthmus.plans import Packing
from isthmus.protocol.run_messages import Arrived, Item, ItemReported, OpenItem, Parcel, PartsArrived, WeightsRead, Work
from isthmus.protocol.worker import Worker
from isthmus.runtime.device.assignment_checks import label, sent_packings
from isthmus.runtime.device.coordinator_link import CoordinatorMessage
from isthmus.runtime.device.copy_streams import CopyStreams
from isthmus.runtime.device.fingerprints import Fingerprinter
from isthmus.runtime.device.finite import watch_of
from isthmus.runtime.device.links import StageLinks
from isthmus.runtime.device.snapshots import Snapshots, SnapshotSender
from isthmus.runtime.device.stage_data import Batches
from isthmus.runtime.device.stage_preparation import group_buffer
from isthmus.runtime.device.state_transfer import StateDonor
from isthmus.runtime.device.tasklets import ComputeTurns, Tasklets
from isthmus.runtime.device.weight_exchange import OpenedExchange, StageExchanges
from isthmus.runtime.messages.assignment import Assignment
from isthmus.runtime.processes.memory import tune_process
from isthmus.trace import Span
from isthmus.training.engine import Engine
from isthmus.training.local_privacy import Privatizer
from isthmus.training.scaling import LOSS_SCALE
from isthmus.training.snapshot import Snapshot
from isthmus.training.split_backward import SplitEngine
from isthmus.training.sums import add_in_order

Chore = Callable[[], None]  # work that another lane leaves to be done between two calls of the worker


class StageRunner:
    """Runs one stage. The compute lane is the thread that calls `run`."""

    def __init__(
        self,
        assignment: Assignment,
        engine: Engine,
        data: Mapping[str, Dataset],
        inbox: queue.SimpleQueue[object],
        report: Callable[[ItemReported | WeightsRead, Item, Snapshot | None], None],
        saved: Mapping[str, Tensor],
        private: Privatizer | None = None,
        sharing: ComputeTurns | None = None,
    ) -> None:
        """`data` holds the `train` and `heldout` sets when this stage reads columns; `saved` what a checkpoint has of
        outer steps, if there is one, among other things. `private` covers what leaves a data holder. Computing is
        `sharing` with other stages of the device, if there are any."""
        self.assignment = assignment
        self.engine = engine
        self.links: StageLinks
        self._inbox = inbox
        self._report = report
        self._worker = Worker(assignment.view, self, assignment.epoch)
        self._finite = watch_of(assignment, engine)
        accelerator = engine.accelerator
        clock = DeviceClock(accelerator) if accelerator.asynchronous and assignment.trace else None
        ways = CopyStreams(accelerator, clock, assignment.device, self.record) if accelerator.asynchronous else None
        self.copy_streams = ways  # between the accelerator and the host; None on the CPU
        self._turns = (sharing or ComputeTurns()).of(assignment.view.stage)
        self._tasklets = Tasklets(assignment.device, accelerator, clock, self.record, self._turns)
        self._batches = Batches(assignment, data, self.copy_streams)
        self._snapshots = Snapshots(self.copy_streams, self._kept)
        self._steps = assignment.start_step  # behind the engine's state
        self._keep: Callable[[int, Snapshot], None] = lambda step, taken: None
        self._snapshot_copy: SnapshotSender | None = None
        self._donor: StateDonor | None = None
        self._transfer_ended: Chore = lambda: None
        self._done: deque[Chore] = deque()
        """Ends of what occupied the compute lane, of which the worker has not heard yet."""
        self._items: dict[int, Item] = {}
        self._exchanges = StageExchanges(engine, assignment.train, assignment.engine.steps, self._read)
        self._outgoing: dict[tuple[Parcel, int, int], dict[str, Tensor]] = {}
        self._norms: Tensor | None = None
        self._all_finite = True  # the loss and gradients of the item that was collected last
        self._count: float | None = None
        """Items that the loss counts: this replica's, or after a sum of gradients with other replicas those of all."""
        self._buffers = {g.group: group_buffer(assignment, g, engine, saved) for g in assignment.groups}
        self._rounds = {g.group: g.rounds for g in assignment.view.groups}
        self._state: Snapshot | None = None
        self._norm_places: dict[int, Tensor] = {}
        self._spans: deque[Span] = deque()
        self._packings = sent_packings(assignment)
        self._private = private
        self.fingerprints = Fingerprinter(None)

    def record(self, span: Span) -> None:
        if self.assignment.trace:
            self._spans.append(span)

    def keeps(self, keep: Callable[[int, Snapshot], None]) -> None:
        """Set the callback for a new snapshot: `keep(step, snapshot)`."""
        self._keep = keep
        if (snapshot_copy := self.assignment.snapshot_copy) is not None:
            known, target = self.assignment, snapshot_copy.stage
            self._snapshot_copy = SnapshotSender(
                known.run,
                known.epoch,
                known.view.stage,
                snapshot_copy,
                lambda message, tensors: self.links.snapshot_copy(target, message, tensors),
            )

    def set_donor(self, donor: StateDonor | None, ended: Chore = lambda: None) -> None:
        """From its step on, which is not over yet or the last one done; `ended` is called when it cannot go on."""
        if donor is not None and not self.assignment.discloses:
            ended()
            return
        done, most = self._steps, self.assignment.engine.steps
        if donor is not None and not done <= donor.step <= most:
            raise PeerError(f"coordinator: asked for the state after {donor.step} steps, expected {done} to {most}")
        self._donor, self._transfer_ended = donor, ended
        if donor is not None and donor.step == self._steps:
            donor.begin(self._whole_state())

    def _send_state(self, given: Mapping[str, Tensor]) -> None:
        """A step is done, with these gradients."""
        if (donor := self._donor) is None:
            return
        if not donor.begun:
            if donor.step == self._steps:
                donor.begin(self._whole_state())
            return
        train, state = self.assignment.train, self.engine.state()
        mutated = {name for op in train.ops for name in op.mutates}
        written = {op.target: state[op.target] for op in train.variables() if op.name in mutated}
        written |= {name: value for name, value in state.items() if name == LOSS_SCALE}
        if not donor.go_on({**written, **given}):
            self._donor = None
            self._transfer_ended()

    def copied(self, state: Mapping[str, Tensor]) -> Snapshot:
        """A copy of the stage's tensors in host memory, which what is computed next does not spoil."""
        return self._snapshots.of(state)

    def _kept(self, step: int, taken: Snapshot) -> None:
        self._keep(step, taken)
        if self._snapshot_copy is not None:
            self._snapshot_copy.begin(step, taken)

    def _hold(self) -> None:
        """Before the stage's state is changed in place: copies of it, and of what is sent of it, must be done."""
        self._snapshots.hold()
        self.links.hold()

    def live(self) -> tuple[int, Mapping[str, Tensor]] | None:
        """Return how many steps are done and the state after them, in host memory, if that is what the engine has at
        this moment. Snapshots that are still being copied are handed on first."""
        self._snapshots.hand_on(wait=True)
        buffers = any(op.mutates for op in self.assignment.train.ops)
        if not self._worker.is_recoverable(self._steps, buffers=buffers):
            return None
        return self._steps, self._snapshots.here(self._whole_state())

    def _whole_state(self) -> dict[str, Tensor]:
        """The engine's after whole steps, and that of outer steps."""
        found = self.engine.state() | self._exchanges.before
        for buffer in self._buffers.values():
            found |= buffer.state()
        return found

    def run(self) -> CoordinatorMessage:
        """Until the coordinator says something that is nothing for this stage; it may go on after that. Raises what
        went wrong in any lane."""
        tune_process()
        try:
            while not isinstance(found := self._next(), CoordinatorMessage):
                if isinstance(found, OpenItem):
                    self._opened(found)
                elif isinstance(found, Arrived | PartsArrived):
                    self._worker.arrived(found)
                else:
                    found()
            return found
        finally:
            self._turns.give()

    def _next(self) -> OpenItem | Arrived | PartsArrived | CoordinatorMessage | Chore:
        """The next event. Arrivals go before the end of a tasklet, so that the next choice sees all of them."""
        while True:
            if not self._done:  # the worker has heard of all that was computed
                self._turns.give()
            try:
                # No timeout here: when the coordinator stays away, its receiving thread puts an error into the inbox.
                found = self._inbox.get(block=not self._done)
            except queue.Empty:
                return self._done.popleft()
            if isinstance(found, Exception):
                raise found
            if callable(found):
                found()
                continue
            if isinstance(found, OpenedExchange):
                found = self._exchanges.opened(found)
            if isinstance(found, OpenItem | Arrived | PartsArrived | CoordinatorMessage):
                return found

    def _opened(self, opened: OpenItem) -> None:
        item = opened.item
        if opened.epoch == self.assignment.epoch:
            item = self._items[item.index] = self.links.opened(item)
        self._worker.opened(item, opened.epoch)

    # What the worker asks

    @contextlib.contextmanager
    def _call(self, item: int, micro_batch: int = -1, *, short: bool = False) -> Generator[None]:
        """Carry out the worker's call inside. Unless `short`, it takes long or waits for other stages."""
        if not short:
            self._turns.give()
        try:
            self._exchanges.begin(item)
            yield
        except StepError as e:
            raise self._batches.placed(e, self._items[item], micro_batch) from e
        self._snapshots.hand_on()

    def compute(self, work: Work, item: int, micro_batch: int) -> None:
        with self._call(item, micro_batch, short=True):
            {"B": self._backward, "W": self._weights}.get(work, self._forward)(work, item, micro_batch)
            self._done.append(partial(self._worker.computed, work, item, micro_batch))

    def _forward(self, work: Work, index: int, micro_batch: int) -> None:
        training = work == "F"
        item = self._items[index]
        number = item.first_micro_batch + micro_batch
        stage = self.assignment.train if training else self.assignment.evaluation
        self._take_shared(index)
        inputs = self._batches.columns(stage, item, micro_batch)
        view = self.assignment.view
        for source in view.of(view.forward_from if training else view.eval_from, item, micro_batch):
            tensors = self.links.take("forward", source, index, micro_batch)
            inputs |= {c.value: t for c, t in zip(stage.received_from(source), tensors, strict=True)}
        if training and micro_batch == view.own(item)[0]:
            self.links.reshape(item.step)
        with self._tasklets.micro_batch(work, index, micro_batch, self._least_s(work, item)):
            out = self.engine.forward(item.step, number, inputs) if training else self.engine.evaluate(number, inputs)
            covered = self._private.forward(number, out, training=training) if self._private is not None else {}
            if training:
                self._finite.forward(number, inputs, out | covered, clipped={ref: out[ref] for ref in covered})
        for target in view.of(view.forward_to if training else view.eval_to, item, micro_batch):
            leaves = out if self._private is None or not self._private.covers(target) else out | covered
            sent = {label(c.value): leaves[c.value] for c in stage.sent_to(target)}
            self._outgoing["forward", target, micro_batch] = sent

    def _backward(self, work: Work, index: int, micro_batch: int) -> None:
        stage = self.assignment.train
        view, item = self.assignment.view, self._items[index]
        came: dict[int, dict[Ref, Tensor]] = {}
        for target in sorted(view.of(view.backward_from, item, micro_batch), reverse=True):
            due = [c.value for c in stage.sent_to(target) if c.gradient]
            tensors = self.links.take("backward", target, index, micro_batch)
            came[target] = dict(zip(due, tensors, strict=True))
        number = item.first_micro_batch + micro_batch
        with self._tasklets.micro_batch(work, index, micro_batch, self._least_s(work, item)):
            arrived = list(came.values()) if self._private is None else self._private.backward(number, came)
            gradients = self.engine.backward(number, arrived)
            self._finite.backward(number, gradients)
        for source in view.of(view.backward_to, item, micro_batch):
            due = [c.value for c in stage.received_from(source) if c.gradient]
            self._outgoing["backward", source, micro_batch] = {label(r): gradients[r] for r in due}

    def _weights(self, work: Work, index: int, micro_batch: int) -> None:
        item = self._items[index]
        with self._tasklets.micro_batch(work, index, micro_batch, self._least_s(work, item)):
            if isinstance(self.engine, SplitEngine):  # others compute both in the backward
                self.engine.weight_gradients(item.first_micro_batch + micro_batch)

    def _least_s(self, work: Work, item: Item) -> float | None:
        """Emulation: a tasklet lasts at least its FLOPs on the emulated device."""
        return (found := self.assignment.emulation) and found.least_s(work, item.step)

    def _take_shared(self, item: int) -> None:
        not_owned = self.assignment.train.shared_from
        for owner in self.assignment.view.parameter_owners:
            if not self.links.holds("shared", owner, item):
                continue  # taken by an earlier micro-batch of this item
            names = [n for n, o in not_owned.items() if o == owner]
            self.engine.set_shared(dict(zip(names, self.links.take("shared", owner, item), strict=True)))

    def send(self, parcel: Parcel, target: int, item: int, micro_batch: int = -1) -> None:
        with self._call(item, short=True):
            self._send(parcel, target, self._items[item], micro_batch)

    def _send(self, parcel: Parcel, target: int, item: Item, micro_batch: int) -> None:
        stage = self.assignment.train
        number, finite = 0.0, True
        tensors: dict[str, Tensor] = {}
        packings: dict[str, Packing] = {}
        samples: list[int] = []
        match parcel:
            case "forward" | "backward":
                tensors = self._outgoing.pop((parcel, target, micro_batch))
                if item.kind == "train":
                    packings = self._packings[parcel, target]
                if any(packing.feedback for packing in packings.values()):
                    tensors = {name: t.contiguous() for name, t in tensors.items()}  # sample after sample
                    samples = self._batches.samples(item, micro_batch)
            case "shared":
                tensors = self.engine.shared_values(
                    [n for n, users in stage.shared_with.items() if target in users],
                    item.step if item.kind == "train" else None,
                )
            case "shared_gradient":
                tensors = self.engine.take_shared_gradients([n for n, o in stage.shared_from.items() if o == target])
            case "count":
                number = self.engine.count(item.step)
            case "norms":
                assert self._norms is not None, "norms are sent after collect"
                tensors, finite = {"norms": self._norms}, self._all_finite
        body = Arrived(
            parcel=parcel,
            source=self.assignment.view.stage,
            item=item.index,
            micro_batch=micro_batch,
            number=number,
            finite=finite,
            epoch=self.assignment.epoch,
        )
        scale = self.engine.loss_scale
        self.links.send(target, body, tensors, packings, samples, scale=scale.value if scale is not None else 1.0)

    def _gather(self, item: int) -> None:
        """Complete this replica's sums: set the count of its loss, and add the gradients from users of tied weights."""
        view = self.assignment.view
        if view.counts:
            others = [s for s in view.others if self.links.holds("count", s, item)]
            known = {s: self.links.take_number("count", s, item) for s in others}
            if view.has_loss:
                known[view.stage] = self.engine.count(self._items[item].step)
            self._count = sum(known[s] for s in sorted(known))
        for user in sorted(view.parameter_users, reverse=True):
            names = [n for n, users in self.assignment.train.shared_with.items() if user in users]
            arrived = self.links.take("shared_gradient", user, item)
            self.engine.add_gradients(dict(zip(names, arrived, strict=True)))

    def fill(self, item: int, groups: tuple[int, ...]) -> None:
        with self._call(item):
            with self._tasklets.tasklet("fill", item):
                if self.assignment.view.averages == "gradients":
                    self._gather(item)
                for group in groups:
                    self._buffers[group].fill(self._count or 0.0)
                    self.fingerprints.summand(item, group, self._buffers[group].flat)
            self._done.append(partial(self._worker.filled, item))

    def send_parts(self, group: int, turn: int, target: int, item: int) -> None:
        with self._call(item):
            flat, assignment = self._buffers[group].flat, self.assignment
            (message,) = (m for m in self._rounds[group][turn].sends if m.other == target)
            body = PartsArrived(
                group=group, round=turn, source=assignment.view.stage, item=item, epoch=assignment.epoch
            )
            self.links.send_parts(target, body, flat[slice(*message.parts.span(flat.numel()))])

    def merge(self, group: int, turn: int, item: int) -> None:
        with self._call(item):
            flat, merged = self._buffers[group].flat, self._rounds[group][turn]
            self.links.hold()
            arrived: dict[int, Tensor] = {}
            for message in sorted(merged.receives, key=lambda m: m.other):
                first, last = message.parts.span(flat.numel())
                found = self.links.take_parts(group, turn, message.other, item)
                if not merged.adds:
                    flat[first:last] = found
                elif self.assignment.view.feeding is None:
                    flat[first:last] += found
                else:
                    arrived[message.other] = found
            if arrived:
                first, last = merged.receives[0].parts.span(flat.numel())  # what arrives in a round is of one stretch
                add_in_order(flat[first:last], self.assignment.view.stage, arrived)

    def take(self, item: int, groups: tuple[int, ...]) -> None:
        with self._call(item):
            self._hold()
            counts = [self._buffers[group].take() for group in groups]
            view = self.assignment.view
            if view.counts and view.averages == "gradients" and view.feeding is None:  # copies know the whole count
                self._count = counts[0]
            self._done.append(partial(self._worker.taken, item))

    def collect(self, item: int) -> None:
        view = self.assignment.view
        with self._call(item):
            with self._tasklets.tasklet("collect", item):
                if not (view.groups and view.averages == "gradients"):
                    self._gather(item)
                self._norms = self.engine.collect(self._count)
                if self.fingerprints.on:
                    self.fingerprints.totals(item, self.engine.owned, self._norms, self._count)
                    self.fingerprints.gradients(item, self.engine.gradients())
                self._all_finite = self._finite.collected(self._norms)
            self._done.append(partial(self._worker.collected, item, finite=self._all_finite))

    def update(self, item: int, *, skip: bool) -> None:
        with self._call(item):
            with self._tasklets.tasklet("update", item):
                self._update(item, skip=skip)
            self._done.append(partial(self._worker.updated, item))

    def _update(self, item: int, *, skip: bool) -> None:
        norms = self._agreed_norms(item) if self.assignment.view.agrees else None
        given = self.engine.gradients() if self._donor is not None and not skip else {}
        self._hold()
        rate_step = self._exchanges.end(step := self._items[item].step)
        if skip:
            self.engine.skip_update()
        else:
            if self.assignment.engine.clip_norm > 0:  # in place, by norms of all stages
                self.fingerprints.before_changes()
            self.engine.update(rate_step, norms)
        self._steps = step + 1
        self._send_state(given)

    def save(self, item: int) -> None:
        with self._call(item):
            state, wanted = self._whole_state(), self.assignment.saves
            saved = {k: v for k, v in state.items() if wanted is None or k in wanted}
            self._state = self._snapshots.of(saved, on_disk=not self.fingerprints.on)
            self.fingerprints.state(item, self._state)
            self._finite.saved(state)
            self._done.append(partial(self._worker.saved, item))

    def keep(self, item: int) -> None:
        with self._call(item):
            self._snapshots.keep(self._steps, self._whole_state())
            self._done.append(partial(self._worker.kept, item))

    def report(self, item: int) -> None:
        with self._call(item):
            self._finish(item)

    def _read(self, item: int, weights: Mapping[str, Tensor]) -> None:
        read = WeightsRead(item=item, epoch=self.assignment.epoch)
        self._report(read, self._items[item], self.copied(weights))

    def _agreed_norms(self, item: int) -> Tensor:
        """Those of all parameters of the model, in its own order."""
        assert self._norms is not None, "norms are known after collect"
        positions, stage = self.assignment.norm_positions, self.assignment.view.stage
        count = 1 + max((place for where in positions.values() for place in where), default=-1)
        norms = torch.zeros(count, device=self._norms.device)
        for other, where in positions.items():
            if other not in self._norm_places:
                self._norm_places[other] = to_device(self.engine.accelerator, torch.tensor(where, dtype=torch.int64))
            known = self._norms if other == stage else self.links.take("norms", other, item)[0]
            norms.index_copy_(0, self._norm_places[other], known)
        return norms

    def _finish(self, item: int) -> None:
        self.fingerprints.end(finished := self._items.pop(item))
        kind = finished.kind
        if kind == "save" and not self._items:  # a run's last item: spans that are not told with it are lost
            self._tasklets.finish()
            self.links.drain()
            self._snapshots.tell()
        take_loss = {"train": self.engine.take_loss, "eval": self.engine.take_evaluation_loss}.get(kind, tuple)
        loss, count, *metrics = take_loss() or (None, None)
        done = ItemReported(
            item=item,
            loss=loss,
            count=count,
            metrics=tuple(metrics),
            spans=tuple(self._spans.popleft() for _ in range(len(self._spans))),
            late_s=self._tasklets.take_late_s(),
            non_finite=self._finite.take(),
            fingerprints=self.fingerprints.take(wait=kind == "save"),
            epoch=self.assignment.epoch,
        )
        state, self._state = self._state, None
        self.links.reported(item)
        self._report(done, finished, state)
        if self._snapshot_copy is not None:
            self._snapshot_copy.go_on()
