"""One worker of a device in a run: gets a stage, runs it, and gets another one when the plan changes."""

from __future__ import annotations

import queue
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from isthmus.accelerators import HOST, Accelerator, open_accelerator
from isthmus.accelerators.copies import to_host
from isthmus.combinations import refused
from isthmus.data import Dataset
from isthmus.errors import IsthmusError, PeerError, RankLost, StepError
from isthmus.graph.boundaries import WATCHED
from isthmus.plans.plan import is_first
from isthmus.protocol.device_session import DeviceSession
from isthmus.protocol.run_messages import (
    DeviceReady,
    DeviceReport,
    GiveState,
    Inventory,
    Item,
    ItemReported,
    OpenItem,
    Pause,
    PlaceWeights,
    SendState,
    SnapshotCopied,
    StateMissing,
    StateReceived,
    TakeState,
    TransferEnded,
    WeightsLacked,
    WeightsRead,
)
from isthmus.protocol.step_failures import MemoryPeak, StepFailure
from isthmus.runtime.device.assignment_checks import check_assignment, expected_parcels, expected_parts, part_shapes
from isthmus.runtime.device.coordinator_link import CoordinatorLink, CoordinatorMessage, failed, of_order
from isthmus.runtime.device.fingerprints import Fingerprinter
from isthmus.runtime.device.island_ranks import begin_session, end_session
from isthmus.runtime.device.links import Expected, StageLinks
from isthmus.runtime.device.own_files import own_weights
from isthmus.runtime.device.part_writer import PartWriter
from isthmus.runtime.device.peer_connections import Endpoint, PeerConnections
from isthmus.runtime.device.snapshots import SnapshotReceiver
from isthmus.runtime.device.stage_data import Batches, stage_data
from isthmus.runtime.device.stage_preparation import check_operators, check_room, check_samples_apart, compile_stage
from isthmus.runtime.device.stage_runner import StageRunner
from isthmus.runtime.device.stage_server import StageServer
from isthmus.runtime.device.state_transfer import (
    DonorConnection,
    StateDonor,
    StateGiver,
    StateJoiner,
    StateOutlets,
    fetch_state,
    follow_state,
)
from isthmus.runtime.identity.blinded_digests import ONE_OWNER
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import (
    Assignment,
    FollowHello,
    ForgetPrompts,
    GenerateStep,
    Peer,
    ReceiveStateMessage,
    ServeStage,
    StateHello,
    StateMessage,
    StatePart,
)
from isthmus.runtime.messages.run import AssignMessage, JoinRun, ToCoordinator, ToDevice
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.reconnection import CoordinatorGone
from isthmus.runtime.transport.rendezvous import PeerDialer
from isthmus.session.session import in_one_line, reason_and_fault
from isthmus.training.delayed import DelayedEngine
from isthmus.training.draws import repeated
from isthmus.training.engine import Engine, TorchEngine
from isthmus.training.faults import is_short_of_memory, shortage
from isthmus.training.island import island_engine
from isthmus.training.local_privacy import Privatizer
from isthmus.training.ranks import Ranks, StageSetUp
from isthmus.training.snapshot import Part, Snapshot, by_part, joined
from isthmus.training.split_backward import SplitEngine
from isthmus.training.stored import Sent, sent_header
from isthmus.training.watched import WatchedEngine
from isthmus.units import format_size

FoundT = TypeVar("FoundT")
OfT = TypeVar("OfT")


class DeviceWorker:
    """One worker of a device; a device that may hold several stages at once has one for each."""

    def __init__(self, coordinator: tuple[str, int], site: Endpoint, run: str, timeout_s: float) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._foreign = site.identity is not None
        self._others = site.data_key != ONE_OWNER  # the coordinator is another owner's, and names only what may be read
        self._site = site
        self._accelerator: Accelerator = HOST
        self._before = 0  # bytes that were in use before the stage was made
        self._ranks: Ranks | None = None
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._session: DeviceSession[Part] = DeviceSession()
        self._session.port = self
        self._data: dict[str, Dataset] = {}
        self._pending: tuple[Assignment, dict[int, SocketChannel]] | None = None  # a stage whose weights are on the way
        self._executor: StageRunner | None = None
        self._joiner: StateJoiner | None = None  # the part of the run's state that a joining device has already
        self._values: Mapping[str, Sent] = {}  # the weights at hand
        self._followed: CoordinatorMessage | None = None  # the order that is being followed, or was last
        self._donors: dict[str, Peer] = {}  # other devices that give state
        self._fetches: list[DonorConnection] = []
        self._giver = StateGiver(run, self._session.memory.values, timeout_s)
        self._outlets = StateOutlets(run, timeout_s)  # to joining devices that get its state while it trains
        self._feeds: list[DonorConnection] = []  # from the devices whose state this one gets while they train
        self._parts = PartWriter(site.checkpoints_to, self._send_saved)
        self._server: StageServer | None = None  # the server of a device that generates text, in place of training
        listener = Listener(
            site.host, site.port, identity=site.identity, trusted_network=site.trusted_network, timeout_s=timeout_s
        )
        dialer = PeerDialer(
            coordinator=coordinator, identity=site.identity, timeout_s=timeout_s, direct=not site.relayed
        )
        near = site.sharing.doors if site.sharing is not None else {}
        if site.sharing is not None:
            site.sharing.doors[site.device] = (site.host, listener.port)
        self._peers = PeerConnections(listener, run, dialer, site.device, near, self._answer)
        port = 0 if site.relayed else listener.port
        join = JoinRun(run=run, device=site.device, host=site.address or site.host, port=port)
        self._control = CoordinatorLink(
            coordinator, site.identity, join, self._inbox, self._session.memory.holdings, self._giver.ordered, timeout_s
        )

    def work(self) -> None:
        """Until the run is over. Errors of this device reach the coordinator before they are raised here."""
        try:
            # Only now: a missing accelerator is reported to the coordinator.
            self._accelerator = open_accelerator(self._site.accelerator, f"device {self._site.device}: accelerator")
            while self._session.phase != "over":
                self._followed = order = self._next()
                try:
                    self._follow(order)
                except Exception as e:
                    self._refuse(of_order(e, order), order.message)
        except Exception as e:
            self._send_failed(e)
            raise
        finally:
            if self._executor is not None:
                self._executor.links.close()
            if self._ranks is not None:
                end_session(self._ranks)
            if self._server is not None:
                self._server.close()
            self._peers.close()
            self._control.close()

    def _next(self) -> CoordinatorMessage:
        """The coordinator's next order. Meanwhile the stage runs, if there is one."""
        while True:
            if self._executor is None:
                if (order := self._waited()) is not None:
                    return order
                continue
            try:
                return self._run_stage(self._executor)
            except CoordinatorGone:
                raise
            except StepError as e:  # of the job's: the coordinator says whether somebody, or this device, tries again
                print(f"device {self._site.device}: {e}", file=sys.stderr, flush=True)
                traceback.print_exc()
                self._send_failed(e)
                self._fail()
            except PeerError as e:
                self._fail()
                self._send_failed(e)
            except Exception as e:
                self._survive(e)

    def _waited(self) -> CoordinatorMessage | None:
        """The next order; None where something else happened, which may have begun a stage."""
        # No timeout here: when the coordinator stays away, its receiving thread puts an error into the inbox.
        found = self._inbox.get()
        if isinstance(found, CoordinatorMessage):
            return found
        if isinstance(found, Exception):
            raise found
        if callable(found):
            try:
                found()
            except Exception as e:
                if self._server is not None or self._followed is None:
                    raise
                self._refuse(of_order(e, self._followed), self._followed.message)
        return None

    def _run_stage(self, executor: StageRunner) -> CoordinatorMessage:
        """Errors of other ranks are raised as if they were of this one."""
        try:
            return executor.run()
        except RankLost as lost:
            assert self._ranks is not None, "ranks are of an island"
            cause = self._ranks.cause(lost)
            print(f"device {self._site.device}: {in_one_line(cause)}", file=sys.stderr, flush=True)
            raise cause from lost

    def _refuse(self, error: Exception, order: AnyMessage) -> None:
        """Handle an order that failed: the coordinator hears of it, or the ranks of an island end."""
        if self._server is not None and isinstance(error, IsthmusError):
            self._server.give_up(error)
        elif isinstance(error, PeerError) and self._site.island is None:
            print(f"device {self._site.device}: {error}", file=sys.stderr, flush=True)
            epoch = order.assignment.epoch if isinstance(order, AssignMessage) else self._epoch
            self._fail()
            self._send(failed(epoch, error))
        else:
            self._survive(error)

    def _survive(self, error: Exception) -> None:
        """Raises what is no want of memory. Where it is, the coordinator gets the figures, and makes a plan with
        them; then the device takes another stage."""
        if not is_short_of_memory(error):
            raise error
        if self._ranks is not None:
            self._ranks.broken = True  # the others may be in the midst of what this one has left
        short = shortage(self._accelerator, error, self._before)
        reason = f"out of memory on {self._accelerator.device}{self._on_stage_message()}: {short.description}"
        print(f"device {self._site.device}: {reason}", file=sys.stderr, flush=True)
        failure = StepFailure(step=-1, what="memory", reason=reason, memory=True)
        self._send(failed(self._epoch, error, failure, short))
        self._fail()

    def _on_stage_message(self) -> str:
        """Return which stage it has, or is to get."""
        assignment = self._executor.assignment if self._executor is not None else None
        assignment = self._pending[0] if self._pending is not None else assignment
        if assignment is None:
            return ""
        planned = f", planned to take {format_size(assignment.memory_bytes)}" if assignment.memory_bytes else ""
        return f" in stage {assignment.view.stage}{planned}"

    @property
    def _epoch(self) -> int:
        return self._session.epoch

    def _follow(self, order: CoordinatorMessage) -> None:
        message = order.message
        match message:
            case ToDevice(body=SendState() as asked):
                self._send_state(asked, message.peers)
            case ToDevice(body=body) if not isinstance(body, OpenItem | SendState | GiveState):
                if isinstance(body, Pause):
                    self._end_following()
                elif isinstance(body, PlaceWeights | TakeState):
                    self._donors |= {peer.device: peer for peer in message.peers}
                given = {h.name: t for h, t in zip(message.tensors, order.tensors, strict=True)}
                order.tensors.clear()  # orders are kept until the next one
                if not isinstance(body, PlaceWeights) or self._takes(body, given):
                    self._session.ordered(body)
            case AssignMessage(assignment=assignment):
                check_assignment(assignment)
                self._end_following()
                self._assignment, self._values = assignment, {}
                self._session.assigned(assignment.epoch, assignment.start_step)
            case ReceiveStateMessage():
                self._receive_states(message)
            case ServeStage() | GenerateStep() | ForgetPrompts():
                if self._server is None:
                    control, inbox = self._control, self._inbox
                    self._server = StageServer(self._run, self._peers, control, inbox, self._accelerator)
                self._server.follow(message, order.tensors)
            case _:
                raise AssertionError(f"the coordinator sent {type(message).__name__}, which is not an instruction")

    # What the session asks

    def ready(self) -> None:
        self._send(DeviceReady(epoch=self._epoch, paths=self._peers.paths(), notes=self._notes))

    def inventory(self) -> None:
        self._accelerator.release_cached()  # others may compute on it too
        self._send(Inventory(holdings=self._session.memory.holdings(), epoch=self._epoch))

    def copied(self, step: int, of: str) -> None:
        self._send(SnapshotCopied(of=of, step=step, epoch=self._epoch))

    def fetch(self, step: int, donors: Mapping[str, frozenset[str]]) -> None:
        assignment = self._assignment
        epoch, shapes = assignment.epoch, part_shapes(assignment)
        for donor, parts in donors.items():
            if donor not in self._donors or not parts <= shapes.keys():
                raise PeerError(
                    f"coordinator: names {donor!r} as donor of {min(parts)!r}, expected a part of the stage"
                )
            receive = partial(
                fetch_state,
                hello=StateHello(run=self._run, device=self._site.device, epoch=epoch, parts=parts),
                step=step,
                shapes={part: shapes[part] for part in parts},
                arrived=partial(self._put, self._session.fetched, epoch, donor),
                timeout_s=self._timeout_s,
            )
            reach = partial(self._reach, self._donors[donor])
            failed = partial(self._put, self._session.unfetched, epoch, donor)
            self._fetches.append(DonorConnection(donor, reach, receive, failed))

    def _answer(self, hello: StateHello | FollowHello, channel: SocketChannel) -> None:
        """Another device asks for state; in the thread of its connection."""
        if isinstance(hello, StateHello):
            self._giver.give(hello, channel)
        else:
            self._outlets.attach(hello, channel)

    def _reach(self, peer: Peer) -> SocketChannel:
        return self._peers.reach(peer)[0]

    def _put(self, act: Callable[[int, OfT, FoundT], None], epoch: int, of: OfT, found: FoundT) -> None:
        """In the thread of a connection."""
        self._inbox.put(partial(act, epoch, of, found))

    def missing(self, donor: str, parts: frozenset[str], reason: str) -> None:
        self._send(StateMissing(donor=donor, parts=parts, reason=reason, epoch=self._epoch))

    def leave(self) -> None:
        """`work` ends when the session is over."""

    def _fail(self) -> None:
        """The stage, or what there is of it, cannot go on."""
        self._session.failed(self._epoch)

    def _send_state(self, asked: SendState, peers: Sequence[Peer]) -> None:
        if (executor := self._executor) is None or asked.epoch != self._epoch:
            return
        if not asked.parts:
            executor.set_donor(None)
            self._outlets.close()
            return
        outlets, ended = self._outlets, TransferEnded(number=asked.number, epoch=asked.epoch)
        outlets.open(asked, peers, lambda: executor.links.busy)
        donor = StateDonor(asked, self._run, self._site.device, outlets.put, outlets.waiting_bytes, executor.copied)
        executor.set_donor(donor, lambda: self._send(ended))

    def _receive_states(self, agreed: ReceiveStateMessage) -> None:
        self._close_feeds()
        self._joiner = StateJoiner(agreed)
        hello = FollowHello(run=self._run, epoch=agreed.epoch, number=agreed.number, device=self._site.device)
        for peer in agreed.peers:
            of, timeout_s = peer.device, self._timeout_s
            receive = partial(follow_state, hello=hello, of=of, arrived=self._put_state, timeout_s=timeout_s)
            failed = partial(self._put, self._lose_feed, agreed.epoch, agreed.number)
            self._feeds.append(DonorConnection(of, partial(self._reach, peer), receive, failed))

    def _put_state(self, message: StateMessage | StatePart, tensors: list[Tensor]) -> None:
        """In the thread of a connection."""
        self._inbox.put(partial(self._receive_state, message, tensors))

    def _lose_feed(self, epoch: int, number: int, reason: str) -> None:
        """The device can still join, and gets its state while all wait."""
        joiner = self._joiner
        if joiner is not None and (epoch, number) == (joiner.epoch, joiner.number):
            print(f"device {self._site.device}: stops its live state transfer: {reason}", file=sys.stderr)
            self._close_feeds()
            self._joiner = None
            self._send(TransferEnded(number=number, epoch=epoch))

    def _close_feeds(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.close()

    def _receive_state(self, message: StateMessage | StatePart, tensors: Sequence[Tensor]) -> None:
        joiner, number = self._joiner, message.number
        if joiner is None or (message.epoch, number) != (joiner.epoch, joiner.number):
            return
        try:
            step = joiner.accept(message, tensors)
        except Exception as e:  # of any kind
            self._lose_feed(joiner.epoch, number, reason_and_fault(e)[0])
            return
        if step is not None:
            self._send(StateReceived(number=number, of=message.of, step=step, epoch=joiner.epoch))

    def _end_following(self) -> None:
        """Keep the state that a joining device has received: it counts from now on."""
        joiner, self._joiner = self._joiner, None
        self._close_feeds()
        if joiner is not None:
            for step, parts in joiner.states():
                self._session.kept(joiner.epoch, step, parts)

    def connect(self) -> None:
        assignment = self._assignment
        torch.set_num_threads(assignment.threads)
        if not self._accelerator.asynchronous:  # the weights come to where it computes
            self._before = check_room(self._accelerator, assignment.memory_bytes)
        try:
            # Before the data: reading it may take one device longer than another's timeout.
            channels = self._peers.connect(assignment, lambda: self._control.outdated(assignment.epoch))
        except PeerError as e:
            self._send_failed(e)
            self._fail()
            return
        self._pending = (assignment, channels)
        self._data |= stage_data(
            assignment, self._site.data_key, foreign=self._foreign, kinds=self._site.data_kinds, known=self._data
        )
        self._session.connected(assignment.epoch)

    def start(self, step: int, own: frozenset[str]) -> None:
        kept = joined(self._session.memory.values(step, own).values())
        placed, self._values = self._values, {}
        self._make(self._assignment, {**placed, **kept})

    def _takes(self, order: PlaceWeights, given: Mapping[str, Tensor]) -> bool:
        """Take the stage's weights, from files of its own and draws too; False where the coordinator is to send more of
        them."""
        if order.epoch != self._epoch:
            return True  # the session knows what to do with it
        found, lacking = own_weights(
            order.files,
            foreign=self._others,
            urls=(*self._site.weights_from, *self._site.checkpoints_to),
            stopped=lambda: self._control.outdated(order.epoch),
        )
        drawn, undrawn = repeated(order.drawn) if order.drawn is not None else ({}, {})
        if self._control.outdated(order.epoch):
            return False
        self._values = {**self._values, **given, **found, **drawn}
        if lacking or undrawn:
            reason = next(iter((lacking or undrawn).values()))
            if self._others and lacking:
                said = f"device {self._site.device}: {len(lacking)} weights come from the coordinator: {reason}"
                print(said, file=sys.stderr, flush=True)
                reason = "it has other files, or none"
            self._send(WeightsLacked(names=(*lacking, *undrawn), reason=reason, epoch=order.epoch))
        return not (lacking or undrawn)

    def _make(self, assignment: Assignment, values: Mapping[str, Sent]) -> None:
        assert self._pending is not None, "links are there before weights are used"
        _, channels = self._pending
        if self._accelerator.asynchronous:
            planned_bytes = assignment.memory_bytes // (self._site.ranks if self._site.sharded else 1)
            self._before = check_room(self._accelerator, planned_bytes)
        check_operators(assignment, self._site.engine)
        if assignment.frozen or not assignment.discloses:
            check_samples_apart(assignment, values, Batches(assignment, self._data))
        released, private = assignment.released, None
        if released is not None:
            private = Privatizer(released, keeps=not assignment.frozen, accelerator=self._accelerator)
        tells = assignment.discloses and released is None
        fingerprints = Fingerprinter(assignment.fingerprints if tells else None, self._accelerator)
        engine = self._engine(assignment, values, fingerprints)
        state = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._accelerator.release_cached()  # of what was received, read and cast
        try:
            self._notes = compile_stage(
                engine,
                self._site.engine,
                assignment,
                Batches(assignment, self._data),
                lambda: self._control.outdated(assignment.epoch),
            )
        except PeerError as e:
            self._send_failed(e)
            self._fail()
            return
        executor = StageRunner(
            assignment,
            engine,
            self._data,
            self._inbox,
            partial(self._report, assignment),
            state,
            private,
            self._site.sharing,
        )
        executor.fingerprints = fingerprints
        executor.keeps(partial(self._keep, assignment))
        executor.links = StageLinks(
            assignment,
            channels,
            Expected(expected_parcels(assignment), expected_parts(assignment)),
            self._inbox,
            executor.record,
            SnapshotReceiver(assignment.snapshot_sources, partial(self._on_snapshot_copied, assignment)),
            executor.copy_streams,
            fingerprints,
        )
        self._executor, self._pending = executor, None
        self._session.started(assignment.epoch)

    def _engine(self, assignment: Assignment, values: Mapping[str, Sent], fingerprints: Fingerprinter) -> Engine:
        train, evaluation, config = assignment.train, assignment.evaluation, assignment.engine
        stage = (train, evaluation, config, values)
        if fingerprints.on and self._accelerator.asynchronous:
            here = self._accelerator.device
            if self._site.identity is not None:  # an audit could not tell which hardware to compute on again
                raise refused("fingerprints", "accelerators that join", f"true on {here}")
            if not config.kernels.deterministic:
                raise refused("fingerprints", "kernels of any order", f"true on {here}")
        if note := config.kernels.use(self._accelerator):
            print(f"device {self._site.device}: {note}", file=sys.stderr, flush=True)
        if assignment.view.splits and self._site.island is None and not assignment.frozen:
            return SplitEngine(*stage, accelerator=self._accelerator)
        if any(name.startswith(WATCHED) for name in train.outputs):
            engine = WatchedEngine(*stage, accelerator=self._accelerator, recompute=assignment.recompute)
            engine.observe = fingerprints.inside
            return engine
        if self._site.island is None:
            kind = DelayedEngine if assignment.view.delayed else TorchEngine
            recompute, frozen = assignment.recompute, assignment.frozen
            return kind(*stage, accelerator=self._accelerator, recompute=recompute, frozen=frozen)
        if assignment.view.delayed:
            raise refused("delayed", "several ranks", "'delayed'")
        if not is_first(self._site.device):
            raise refused("two stages", "several ranks", "two stages")
        self._ranks = self._ranks or begin_session(self._site.island, self._site.ranks, self._accelerator)
        made = StageSetUp(
            train=train,
            evaluation=evaluation,
            config=config,
            recompute=assignment.recompute,
            frozen=assignment.frozen,
            threads=assignment.threads,
            sharded=self._site.sharded,
        )
        return island_engine(made, values, self._ranks)

    def close_stage(self) -> None:
        """Its state stays in memory if it is that of a whole step."""
        self._outlets.close()
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            fetch.close()
        executor, self._executor = self._executor, None
        pending, self._pending = self._pending, None
        for channel in (pending[1] if pending is not None else {}).values():
            channel.close()
        if executor is None:
            return
        executor.links.abandon()
        if self._ranks is not None and self._ranks.broken:
            end_session(self._ranks)
            self._ranks = live = None
        else:
            live = executor.live()
        if live is not None:
            step, state = live
            # On the host: the next stage needs the accelerator's memory.
            kept = by_part(to_host(self._accelerator, state))
            self._session.kept(executor.assignment.epoch, step, kept)
        self._drop_stale()

    def _drop_stale(self) -> None:
        """Drop the stage's messages that are left in the inbox: links that were closed send no more."""
        kept: list[object] = []
        while not self._inbox.empty():
            found = self._inbox.get()
            if isinstance(found, CoordinatorMessage | CoordinatorGone) or callable(found):
                kept.append(found)
        for found in kept:
            self._inbox.put(found)

    def _keep(self, assignment: Assignment, step: int, taken: Snapshot) -> None:
        self._session.kept(assignment.epoch, step, by_part(taken.tensors()))

    def _on_snapshot_copied(self, assignment: Assignment, stage: int, step: int, taken: Snapshot) -> None:
        """In the thread of the stage's link."""
        of = next(n.device for n in assignment.neighbours if n.stage == stage)
        self._inbox.put(partial(self._session.kept, assignment.epoch, step, by_part(taken.tensors()), of))

    def _peak(self) -> MemoryPeak:
        found = self._accelerator.memory()
        return MemoryPeak(
            size_bytes=max(0, found.peak_allocated - self._before),
            reserved_bytes=max(0, found.peak_reserved - self._before),
            resident=not self._accelerator.asynchronous,
        )

    def _report(
        self, assignment: Assignment, done: ItemReported | WeightsRead, item: Item, saved: Snapshot | None
    ) -> None:
        if isinstance(done, ItemReported):
            done = done if saved is None else msgspec.structs.replace(done, peak=self._peak())
            self._parts.report(done, item, assignment.store, saved)
        else:
            self._send_saved(done, saved)

    def _send_saved(self, done: ItemReported | WeightsRead, saved: Snapshot | None) -> None:
        """Send a report, by any thread; without the tensors of an epoch that is over, as nobody wants them."""
        if isinstance(done, ItemReported) and self._control.outdated(done.epoch):
            saved = None
        self._send(done, saved.sent() if saved is not None else {}, saved)

    def _send(
        self,
        body: DeviceReport | WeightsRead | WeightsLacked,
        tensors: Mapping[str, Sent] = {},
        of: Snapshot | None = None,
    ) -> None:
        headers = tuple(sent_header(name, t) for name, t in tensors.items())
        self._control.send(ToCoordinator(run=self._run, body=body, tensors=headers), list(tensors.values()), of)

    def _send_failed(self, error: Exception) -> None:
        self._send(failed(self._epoch, error))
