"""A device's side of its connection to a coordinator: dialled, served, and made again when it breaks.

    dial ──► first message ──► heartbeats and messages ──► it breaks ──► wait ──► dial ──► ...

A local executor dials once. A device gives up on a coordinator that stays away, an agent never does.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, NoReturn, TypeVar

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.fleet import Link
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.identity import Identity
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport.channel import MAX_ASSIGNMENT_BYTES, Guard, MessageChannel, Received, SocketChannel, dial
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.message_sender import MessageSender, start_heartbeats
from isthmus.runtime.transport.tcp import WAITS_S
from isthmus.session.session import reason_and_fault

LOG_S = 3.0  # an outage is logged when nothing was received for so long, then each time after twice as long
Sending = TypeVar("Sending", SendLane, MessageSender)


class CoordinatorGone(PeerError):
    """It stays away, or does not speak as one."""


class Retry(NamedTuple):
    waits_s: Sequence[float] = WAITS_S
    """Between attempts; the last one again and again. A connection that outlasts the wait begins with the first."""
    away_s: float = math.inf  # attempts end when nothing was received for longer
    log_s: float = LOG_S  # outages are logged from then on


class Outage(NamedTuple):
    """A connection that broke, or could not be made."""

    error: PeerError
    silent_s: float  # since the last message
    wait_s: float  # until the next attempt
    log: bool  # whether to log it: the first time, when the reason changes, and when it lasts twice as long


class OpenConnection(Generic[Sending]):
    """One connection, from its first message to its end. One thread receives, any may put."""

    def __init__(self, channel: MessageChannel, sender: Sending, run: str, timeout_s: float) -> None:
        self.channel, self.sender = channel, sender
        self.run, self.timeout_s = run, timeout_s
        self.ended = threading.Event()
        self.opened_s = time.monotonic()
        self.received_s = -math.inf  # when the last message came

    def start_heartbeats(self, timeout_s: float) -> None:
        """Until the end of the connection, for a coordinator with this timeout."""
        start_heartbeats(self.run, timeout_s, self.ended, lambda: (self.sender,))

    def next(self, guard: Guard | None = None) -> Received:
        """Wait for a message. PeerError when the connection ends, also by `close`."""
        if (received := self.channel.receive(guard, idle_s=self.timeout_s)) is None:
            raise PeerError(f"{self.channel.other}: closed the connection")
        self.received_s = time.monotonic()
        return received

    def receive(self, on_message: Callable[[AnyMessage, list[Tensor]], object], guard: Guard | None = None) -> NoReturn:
        """Hand over the messages. Ends as `next`."""
        while True:
            on_message(*self.next(guard))

    def close(self, flush_s: float = 0.0) -> None:
        """Send what was put, but take no longer than this, and hang up."""
        self.ended.set()
        self.sender.close(flush_s)
        self.channel.close()


class CoordinatorConnection(Generic[Sending]):
    """One connection after another, never two at once."""

    def __init__(
        self,
        dialled: Callable[[], tuple[MessageChannel, Sending]],
        first: Callable[[], AnyMessage],
        *,
        run: str,
        timeout_s: float,
        retry: Retry | None = None,
        on_lost: Callable[[Outage], object] = lambda _: None,
    ) -> None:
        """`first` makes each connection's first message. Without `retry` a connection that breaks is not made again.
        `on_lost` is called in the thread of `serve`: true dials again at once, what it raises ends `serve`."""
        self.over = threading.Event()
        """Nothing is dialled any more; a connection that is open ends when it breaks or is closed."""
        self.current: OpenConnection[Sending] | None = None
        self.connected = threading.Event()
        self.run = run
        self._dialled, self._first, self._timeout_s = dialled, first, timeout_s
        self._retry, self._on_lost = retry, on_lost
        self._received_s = time.monotonic()
        self._failed = 0
        self._logged: Outage | None = None

    def connect(self) -> OpenConnection[Sending]:
        """Make the first connection before `serve` is called. PeerError."""
        channel, sender = self._dialled()
        sender.put(self._first())
        self.current = connection = OpenConnection(channel, sender, self.run, self._timeout_s)
        missed = self.over.is_set()  # `close` came before; one that comes later sends first what was put
        self.connected.set()
        connection.start_heartbeats(self._timeout_s)
        if missed:
            connection.close()
        return connection

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message; while there is no connection it is dropped."""
        if (connection := self.current) is not None:
            connection.sender.put(message, tensors)

    def serve(self, act: Callable[[OpenConnection[Sending]], object]) -> None:
        """Until `close`, or until `act` returns. A PeerError ends a connection, any other error `serve`.
        CoordinatorGone when nothing was received for too long."""
        while not self.over.is_set():
            try:
                act(self.current or self.connect())
                return
            except PeerError as e:
                if self.over.is_set():
                    return
                if self._retry is None:
                    raise
                error = e
            finally:
                lasted_s = self._disconnect()
            self._wait(error, lasted_s, self._retry)

    def close(self, flush_s: float = 0.0) -> None:
        """Send what was put, but take no longer than this, and hang up for good. Ends `serve` in another thread."""
        self.over.set()
        if (connection := self.current) is not None:
            connection.close(flush_s)

    def _disconnect(self) -> float:
        """Returns how long the connection has lasted."""
        if (connection := self.current) is None:
            return 0.0
        self.current = None
        self.connected.clear()
        connection.close()
        if connection.received_s > self._received_s:
            self._received_s, self._logged = connection.received_s, None
        return time.monotonic() - connection.opened_s

    def _wait(self, error: PeerError, lasted_s: float, retry: Retry) -> None:
        waits_s, logged = retry.waits_s, self._logged
        if lasted_s > waits_s[min(self._failed, len(waits_s) - 1)]:
            self._failed = 0
        wait_s, silent_s = waits_s[min(self._failed, len(waits_s) - 1)], time.monotonic() - self._received_s
        self._failed += 1
        longer = logged is None or silent_s >= 2 * max(logged.silent_s, LOG_S) or str(error) != str(logged.error)
        outage = Outage(error, silent_s, wait_s, longer and silent_s >= retry.log_s)
        if self._on_lost(outage):
            return
        self._logged = outage if outage.log else logged
        if silent_s > retry.away_s:
            raise CoordinatorGone(f"{error}; it did not come back for {retry.away_s:g} s")
        self.over.wait(wait_s)


def dial_lane(
    address: tuple[str, int], other: str, timeout_s: float, identity: Identity | None, shape: Link | None = None
) -> tuple[SocketChannel, SendLane]:
    """Connect to a coordinator whose messages may hold graphs; `shape` emulates the link to it."""
    channel = dial(*address, other, timeout_s, identity=identity, most_header_bytes=MAX_ASSIGNMENT_BYTES)
    return channel, SendLane(channel, shape=shape, timeout_s=timeout_s, on_error=lambda _: channel.close())


def direct(channel: MessageChannel) -> tuple[MessageChannel, MessageSender]:
    """For messages that are sent by the thread that puts them."""
    return channel, MessageSender(channel, on_error=lambda _: channel.close())


@contextlib.contextmanager
def reporting(send: Callable[[DeviceFailed], object]) -> Generator[None]:
    """An error of the block is reported before it is raised."""
    try:
        yield
    except Exception as e:
        reason, fault = reason_and_fault(e)
        send(DeviceFailed(reason=reason, fault=fault))
        raise
