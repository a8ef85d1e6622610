"""State from device to device. The device that lacks it dials each donor that the coordinator named.

Before a stage begins:

    receiver ── StateHello: device, epoch, parts ──► donor    both are named by the coordinator's orders
    receiver ◄── GivenPart, GivenPart, ... ───────── donor    from the memory of its session, whatever its stage does
    receiver ── closes the connection when it has all that it asked for

A part is refused before it is received unless it is of this run, epoch and step, was asked for and is not here yet, and
has the shapes of the receiver's stage. What is here stays when the connection breaks.

While the others train, a joining device follows them:

    joining device ── FollowHello: device, number ──► donor
    joining device ◄── StateMessage, StatePart ...  ─ donor    the state, then each step's gradients

What the donor sends to other stages goes first.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Literal, NamedTuple

from torch import Tensor, nn

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.protocol.run_messages import GiveState, SendState
from isthmus.runtime.device.peer_connections import is_peer
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import (
    FollowHello,
    GivenPart,
    Peer,
    ReceiveStateMessage,
    StateHello,
    StateMessage,
    StatePart,
)
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.channel import SocketChannel, frame
from isthmus.runtime.transport.lanes import ShapedLink
from isthmus.runtime.transport.message_sender import PER_TIMEOUT, headers_of
from isthmus.session.session import reason_and_fault
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader, check_header, pack
from isthmus.training.optim import Optimizers
from isthmus.training.snapshot import (
    IncomingSnapshot,
    Part,
    Snapshot,
    by_part,
    check_state,
    part_of,
    snapshot,
    stretch_bytes,
    stretches,
)

Shapes = Mapping[str, tuple[int, ...]]


class StateSender:
    """The way of states to another device, shaped where links are emulated."""

    def __init__(self, channel: SocketChannel, shape: Link | None) -> None:
        self._channel = channel
        self._failures: list[Exception] = []
        self._link = ShapedLink(channel, shape, self._failures.append) if shape is not None else None

    def send(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Return when it has left. PeerError where it cannot."""
        payload = [pack(t) for t in tensors]
        if self._link is None:
            self._channel.send(message, payload)
        else:
            self._link.send(frame(message, payload), time.monotonic())
        if self._failures:
            raise PeerError(f"{self._channel.other}: {self._failures[0]}")

    def close(self) -> None:
        """Wait until all has arrived."""
        if self._link is not None:
            self._link.close()


class _Order(NamedTuple):
    step: int
    parts: frozenset[str]
    peer: Peer


class StateGiver:
    """The donor's side: gives what the coordinator ordered to whom it named. Any thread."""

    def __init__(self, run: str, values: Callable[[int, Set[str]], Mapping[str, Part]], timeout_s: float) -> None:
        """`values` returns parts of the state after a step, as far as they are in memory. Who asks before the
        coordinator's order is here waits for `timeout_s`."""
        self._run = run
        self._values = values
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._epoch = -1  # of the orders
        self._orders: dict[str, _Order] = {}  # by receiver

    def ordered(self, order: GiveState, peers: Sequence[Peer]) -> None:
        """`peers`: the receivers. Those of earlier epochs get no more."""
        named = {peer.device: peer for peer in peers}
        with self._changed:
            if order.epoch > self._epoch:
                self._epoch, self._orders = order.epoch, {}
            if order.epoch < self._epoch:
                return
            for device, parts in order.receivers.items():
                if device not in named:
                    continue  # it is gone
                before = self._orders.get(device)
                parts = parts | before.parts if before is not None else parts
                self._orders[device] = _Order(order.step, parts, named[device])
            self._changed.notify_all()

    def give(self, hello: StateHello, channel: SocketChannel) -> None:
        """Answer a device that asks. Returns when the connection is closed; who may not ask gets nothing."""
        try:
            if (
                hello.run == self._run
                and (order := self._wait(hello)) is not None
                and is_peer(channel.party, order.peer)
            ):
                self._send(hello, order, channel)
        except PeerError:  # the receiver says what it lacks
            pass
        finally:
            channel.close()

    def _wait(self, hello: StateHello) -> _Order | None:
        """Return the order that covers the request; None if none comes."""

        def covers() -> bool:
            found = self._orders.get(hello.device)
            return self._epoch == hello.epoch and found is not None and hello.parts <= found.parts

        with self._changed:
            self._changed.wait_for(lambda: self._epoch > hello.epoch or covers(), self._timeout_s)
            return self._orders[hello.device] if covers() else None

    def _send(self, hello: StateHello, order: _Order, channel: SocketChannel) -> None:
        values, sender = self._values(order.step, hello.parts), StateSender(channel, order.peer.shape)
        for part in sorted(hello.parts & values.keys()):
            tensors = values[part]
            given = GivenPart(run=self._run, epoch=hello.epoch, step=order.step, part=part, tensors=headers_of(tensors))
            sender.send(given, list(tensors.values()))
            if self._epoch != hello.epoch:
                return
        sender.close()
        if hello.parts <= values.keys():
            channel.receive(_nothing, idle_s=self._timeout_s)  # until the receiver has all and closes


def _nothing(message: AnyMessage) -> None:
    raise PeerError(f"sent {type(message).__name__} after it asked for state")


STRETCH_BYTES = 1 << 18  # sent at once: what else there is to say waits for no more
MOST_YIELD_S, LOOK_S = 0.05, 0.002  # how long a whole stretch lets other stages go first, and how often it looks
MOST_BACKLOG, LEAST_BACKLOG_BYTES = 2.0, 1 << 20
"""Copies of the sent state that may wait to be sent; with more, steps are quicker than their gradients travel. A small
state's wait for the joining device to connect as well."""
Put = Callable[[StateMessage | StatePart, Sequence[Tensor], "Snapshot | None"], None]
"""The tensors are stretches of the snapshot, which may still be being copied."""
_Outgoing = tuple[StateMessage | StatePart, Sequence[Tensor], "Snapshot | None"]


class StateDonor:
    """Gives what joining devices need. Used by the compute lane alone."""

    def __init__(
        self,
        asked: SendState,
        run: str,
        of: str,
        put: Put,
        waiting: Callable[[], int],
        copied: Callable[[Mapping[str, Tensor]], Snapshot] = snapshot,
    ) -> None:
        """`of` is this device; `put` hands a message to the connection, behind all others; `waiting` tells how many
        bytes wait there; `copied` copies tensors to host memory."""
        self._asked = asked
        self._run = run
        self._of = of
        self.step = asked.step  # from the state after so many steps on
        self._put = put
        self._waiting = waiting
        self._copied = copied
        self._state_bytes = 0
        self.begun = False

    def begin(self, state: Mapping[str, Tensor]) -> None:
        """`state` is the stage's, after `step` steps."""
        self._state_bytes = self._send_state("state", state)
        self.begun = True

    def go_on(self, given: Mapping[str, Tensor]) -> bool:
        """The stage has done one more step: `given` are the gradients that its optimizers got, and buffers as they are
        now. False when this can go on no longer."""
        if self._waiting() > max(MOST_BACKLOG * self._state_bytes, LEAST_BACKLOG_BYTES):
            return False
        self.step += 1
        self._send_state("gradients", given)
        return True

    def _send_state(self, kind: Literal["state", "gradients"], tensors: Mapping[str, Tensor]) -> int:
        asked = self._asked
        taken = self._copied({name: t for name, t in tensors.items() if part_of(name) in asked.parts})
        self._put(
            StateMessage(
                run=self._run,
                epoch=asked.epoch,
                number=asked.number,
                of=self._of,
                kind=kind,
                step=self.step,
                headers=taken.headers,
            ),
            (),
            None,
        )
        for offset, stretch, headers in stretches(taken.flat, STRETCH_BYTES):
            self._put(
                StatePart(
                    run=self._run, epoch=asked.epoch, number=asked.number, of=self._of, offset=offset, tensors=headers
                ),
                [stretch],
                taken,
            )
        return taken.flat.numel()


class StateOutlets:
    """The donor's connections to joining devices. `attach` is called by the thread of a connection, which sends."""

    def __init__(self, run: str, timeout_s: float) -> None:
        """A device that asks before the coordinator's order is here waits for `timeout_s`."""
        self._run = run
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._transfer = (-1, -1)  # epoch and number
        self._peers: dict[str, Peer] = {}  # joining devices that have not come yet
        self._outgoing: dict[str, queue.SimpleQueue[_Outgoing | None]] = {}  # by joining device
        self._waiting_bytes: dict[str, int] = {}
        self._busy: Callable[[], bool] = lambda: False

    def open(self, asked: SendState, peers: Sequence[Peer], busy: Callable[[], bool]) -> None:
        """`busy` says whether other stages are waited for: states go when they are not, or after a while."""
        self.close()
        with self._changed:
            self._transfer, self._busy = (asked.epoch, asked.number), busy
            self._peers = {peer.device: peer for peer in peers}
            self._outgoing = {device: queue.SimpleQueue() for device in self._peers}
            self._waiting_bytes = dict.fromkeys(self._peers, 0)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is sent any more, and what waits is dropped."""
        with self._changed:
            outgoing, self._outgoing, self._peers, self._waiting_bytes = self._outgoing, {}, {}, {}
            self._changed.notify_all()
        for one in outgoing.values():
            one.put(None)

    def put(self, message: StateMessage | StatePart, tensors: Sequence[Tensor], of: Snapshot | None) -> None:
        """Hand a message to all joining devices; the caller does not wait."""
        with self._changed:
            for device, outgoing in self._outgoing.items():
                self._waiting_bytes[device] += sum(t.nbytes for t in tensors)
                outgoing.put((message, tensors, of))

    def waiting_bytes(self) -> int:
        """Return the most bytes that wait to be sent to one device."""
        return max(self._waiting_bytes.values(), default=0)

    def attach(self, hello: FollowHello, channel: SocketChannel) -> None:
        """Send what was put, and what will be, until `close`; who may not follow gets nothing."""
        transfer = (hello.epoch, hello.number)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._transfer >= transfer, self._timeout_s)
                peer = self._peers.get(hello.device) if self._transfer == transfer else None
                if hello.run != self._run or peer is None or not is_peer(channel.party, peer):
                    return
                del self._peers[hello.device]
                outgoing, busy = self._outgoing[hello.device], self._busy
            self._send(hello.device, outgoing, StateSender(channel, peer.shape), busy)
        except PeerError:  # the joining device says so
            pass
        finally:
            channel.close()

    def _send(
        self,
        device: str,
        outgoing: queue.SimpleQueue[_Outgoing | None],
        sender: StateSender,
        busy: Callable[[], bool],
    ) -> None:
        while True:
            try:
                entry = outgoing.get(timeout=self._timeout_s / PER_TIMEOUT)
            except queue.Empty:
                sender.send(Heartbeat(run=self._run))
                continue
            if entry is None or self._outgoing.get(device) is not outgoing:
                return
            message, tensors, of = entry
            if of is not None:
                of.wait()
            size_bytes = sum(t.nbytes for t in tensors)
            end_s = time.monotonic() + MOST_YIELD_S * size_bytes / STRETCH_BYTES
            while busy() and time.monotonic() < end_s:
                time.sleep(LOOK_S)
            sender.send(message, tensors)
            with self._changed:
                if self._outgoing.get(device) is outgoing:
                    self._waiting_bytes[device] -= size_bytes


class DonorConnection:
    """A connection to a donor, dialled and received by a thread."""

    def __init__(
        self,
        of: str,
        reach: Callable[[], SocketChannel],
        receive: Callable[[SocketChannel, threading.Event], None],
        failed: Callable[[str], None],
    ) -> None:
        """`reach` dials the donor. `receive` gets the connection and what `close` sets, and returns at the end. The
        thread calls `failed` with the reason where it ends otherwise than was agreed; not after `close`."""
        self._reach, self._receive, self._failed = reach, receive, failed
        self._closed = threading.Event()
        self._channel: SocketChannel | None = None
        threading.Thread(target=self._run, name=f"get state of {of}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if (channel := self._channel) is not None:
            channel.close()

    def _run(self) -> None:
        try:
            self._channel = channel = self._reach()
            try:
                self._receive(channel, self._closed)
            finally:
                channel.close()
        except Exception as e:  # of any kind: the coordinator has another way to get the state there
            if not self._closed.is_set():
                self._failed(reason_and_fault(e)[0])


def fetch_state(
    channel: SocketChannel,
    closed: threading.Event,
    *,
    hello: StateHello,
    step: int,
    shapes: Shapes,
    arrived: Callable[[Mapping[str, Part]], None],
    timeout_s: float,
) -> None:
    """Get the parts of one donor, of these `shapes`. `arrived` gets each of them. PeerError where no more come."""
    channel.send(hello)
    due = dict(shapes)
    while due and not closed.is_set():
        received = channel.receive(lambda message: check_part(message, hello, step, due), timeout_s)
        if received is None:
            raise PeerError(f"{channel.other}: closed the connection before it gave {min(due)!r}")
        given, tensors = received
        assert isinstance(given, GivenPart), "no other message is let in"
        del due[given.part]
        if not closed.is_set():
            arrived({given.part: {h.name: t for h, t in zip(given.tensors, tensors, strict=True)}})


def check_part(message: AnyMessage, hello: StateHello, step: int, due: Shapes) -> None:
    """PeerError, which does not name the donor, unless it is a part that is due."""
    if not isinstance(message, GivenPart):
        raise PeerError(f"sent {type(message).__name__} where a part of a state was due")
    got, expected = (message.run, message.epoch, message.step), (hello.run, hello.epoch, step)
    if got != expected:
        what = next(w for w, a, b in zip(("run", "epoch", "step"), got, expected, strict=True) if a != b)
        raise PeerError(f"sent a part of a state of another {what}: {got!r}, expected {expected!r}")
    if message.part not in due:
        raise PeerError(f"sent {message.part!r}, which is not a part that was asked for and is still to come")
    check_state({message.part: due[message.part]}, message.tensors)


def follow_state(
    channel: SocketChannel,
    closed: threading.Event,
    *,
    hello: FollowHello,
    of: str,
    arrived: Callable[[StateMessage | StatePart, list[Tensor]], None],
    timeout_s: float,
) -> None:
    """Get the state of the donor `of`, and what it says later. A donor that hangs up between two messages has an order
    to, or is lost; PeerError if it has said nothing."""
    channel.send(hello)
    begun = False
    while not closed.is_set():
        if (received := channel.receive(lambda message: check_followed(message, hello, of), timeout_s)) is None:
            if begun:
                return
            raise PeerError(f"{channel.other}: closed the connection")
        begun = True
        if isinstance(received[0], StateMessage | StatePart) and not closed.is_set():
            arrived(received[0], received[1])


def check_followed(message: AnyMessage, hello: FollowHello, of: str) -> None:
    """PeerError, which does not name the donor, unless it is a stretch of bytes, or says what bytes will be, of this
    transfer."""
    if isinstance(message, StatePart):
        size = stretch_bytes(message.tensors)
        fits = size is not None and size <= STRETCH_BYTES
    else:
        fits = isinstance(message, StateMessage | Heartbeat) and not message.tensors
    if not fits:
        raise PeerError(f"sent {type(message).__name__} of {[h.nbytes for h in message.tensors]} bytes as state")
    if isinstance(message, StateMessage | StatePart):
        got = (message.run, message.epoch, message.number, message.of)
        due = (hello.run, hello.epoch, hello.number, of)
        if got != due:
            raise PeerError(f"sent state of run, epoch, transfer and device {got!r}, expected {due!r}")


class StateJoiner:
    """A joining device's side: the states that it follows. PeerError for what was not agreed."""

    def __init__(self, agreed: ReceiveStateMessage) -> None:
        self.number = agreed.number
        self.epoch = agreed.epoch
        self._agreed = agreed
        self._arriving: dict[str, tuple[int, IncomingSnapshot]] = {}
        """The step of the state that arrives now from each donor, or of the gradients that led to it."""
        self._receivers: dict[str, CatchUpState] = {}

    def accept(self, message: StateMessage | StatePart, tensors: Sequence[Tensor]) -> int | None:
        """Return how many steps the donor's parts have behind them here now, if that is news."""
        of = message.of
        if of not in self._agreed.donated:
            raise PeerError(f"device {of!r} sent state that was not requested")
        if isinstance(message, StateMessage):
            try:
                self._check(message)
            except PeerError as e:
                raise PeerError(f"device {of!r}: {e}") from None
            self._arriving[of] = message.step, IncomingSnapshot(message.headers)
        elif of not in self._arriving or not self._arriving[of][1].expects(message.offset, message.tensors):
            raise PeerError(f"device {of!r} sent bytes {message.offset} out of order")
        else:
            self._arriving[of][1].add(tensors[0])
        return self._done(of) if self._arriving[of][1].whole else None

    def states(self) -> Iterator[tuple[int, Mapping[str, Part]]]:
        """Return the states that have arrived: steps, and parts after them."""
        return ((catch_up.step, by_part(catch_up.state())) for catch_up in self._receivers.values())

    def _check(self, begun: StateMessage) -> None:
        """Errors do not name the donor."""
        shapes, catch_up = self._agreed.donated[begun.of], self._receivers.get(begun.of)
        if begun.of in self._arriving:
            raise PeerError("began another copy before the last one was whole")
        if begun.kind == "state" and catch_up is None and begun.step == self._agreed.step:
            check_state(shapes, begun.headers)
        elif begun.kind == "state" or catch_up is None or begun.step != catch_up.step + 1:
            raise PeerError(f"sent {begun.kind} of step {begun.step} out of order")
        else:
            _check_gradients(shapes, begun.headers)

    def _done(self, of: str) -> int:
        step, arrived = self._arriving.pop(of)
        tensors = arrived.snapshot.tensors()
        if of in self._receivers:
            self._receivers[of].repeat(tensors)
        else:
            agreed = self._agreed
            self._receivers[of] = CatchUpState(agreed.config, agreed.trained, step, tensors)
        return self._receivers[of].step


def _check_gradients(shapes: Mapping[str, tuple[int, ...]], headers: Sequence[TensorHeader]) -> None:
    for header in headers:
        check_header(header)
        if header.shape != shapes.get(header.name) or header.packing is not None:
            raise PeerError(f"sent {header.name!r} of shape {list(header.shape)}, which is not in its stage")
    if len({h.name for h in headers}) < len(headers):
        raise PeerError("sent a tensor twice")


class CatchUpState:
    """Parts of a model after `step` steps. Bit for bit the stage's own, on a processor of the same kind: an update is
    element by element."""

    def __init__(self, config: EngineConfig, trained: Set[str], step: int, state: Mapping[str, Tensor]) -> None:
        """`state` as a stage's `Engine.state`; of it, optimizers update what is `trained`."""
        own = {name: value for name, value in state.items() if not name.startswith(OPTIMIZER)}
        self._parameters = {n: nn.Parameter(value.clone()) for n, value in own.items() if n in trained}
        self._buffers = {n: value for n, value in own.items() if n not in trained}
        self._optimizers = Optimizers(config.optimizers, self._parameters, config.learning_rate, config.steps)
        self._optimizers.load(state)
        self._config = config
        self.step = step

    def repeat(self, given: Mapping[str, Tensor]) -> None:
        """The next step. `given`: each parameter's gradient as the stage's optimizers get it, none where it has none,
        and the buffers' values."""
        for name, value in given.items():
            if name in self._parameters:
                self._parameters[name].grad = value
            else:
                self._buffers[name] = value
        self._optimizers.step(self.step)
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        """Return the same as `Engine.state`: no copies."""
        found = {name: p.detach() for name, p in self._parameters.items()}
        return found | self._buffers | self._optimizers.state()
