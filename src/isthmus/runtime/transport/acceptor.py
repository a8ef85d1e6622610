"""Admits connections to a run's coordinator: one per device of the run, and no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import ClassVar, NamedTuple, TypeVar

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.channel import Landing, MessageChannel, in_host_memory


class Rate(NamedTuple):
    """The most messages of one connection."""

    per_s: float  # in the long run
    burst: float  # at once


class RateLimit:
    """A token bucket."""

    def __init__(self, rate: Rate) -> None:
        self._per_s, self._burst = rate
        self._left = rate.burst
        self._spent_s = 0.0

    def spend(self, now_s: float) -> None:
        """One message at this time of a monotonic clock; PeerError when it is one too many."""
        gained = (now_s - self._spent_s) * self._per_s
        self._left = min(self._burst, self._left + gained) - 1
        self._spent_s = now_s
        if self._left < 0:
            raise PeerError(f"sent more than {self._per_s:g} messages a second")


def limited(rate: Rate, check: Callable[[AnyMessage], None]) -> Callable[[AnyMessage], None]:
    """Return a check of one connection's messages that also refuses (PeerError) those beyond the rate."""
    limit = RateLimit(rate)

    def both(message: AnyMessage) -> None:
        limit.spend(time.monotonic())
        check(message)

    return both


MOST_LINES = 10  # about one device in a window
WINDOW_S = 30.0


class LogLimiter:
    """Lines about devices. One that comes and goes, or sends nonsense, again and again gets so many of them, and then
    a count: what devices do must not fill a disk. Any thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[float, int]] = {}
        """The beginning of each device's window, and how many lines there were about it since then."""

    def about(self, device: str, text: str) -> None:
        self.look()
        with self._lock:
            began_s, lines = self._windows.get(device, (time.monotonic(), 0))
            self._windows[device] = (began_s, lines + 1)
        if lines < MOST_LINES:
            self._log(text)

    def look(self) -> None:
        """Tell the counts of windows that are over; to be called now and then."""
        now_s = time.monotonic()
        with self._lock:
            over = {d: lines for d, (began_s, lines) in self._windows.items() if now_s - began_s >= WINDOW_S}
            for device in over:
                del self._windows[device]
        for device, lines in over.items():
            if lines > MOST_LINES:
                self._log(f"{device}: {lines - MOST_LINES} more lines about it in {WINDOW_S:g} s")


ReceivedMessage = tuple[str, AnyMessage | Exception | None, list[Tensor]]
"""A device's name and its message with tensors; or what ended its connection, None if it closed it."""
OnMessage = Callable[[ReceivedMessage], Callable[[], None] | None]
"""Takes a message; what may take longer it returns, to be called without the acceptor's lock."""
AT_WORK = Rate(5000.0, 50_000.0)
"""A device of a run sends a report for each item, and heartbeats. Steps take longer than a millisecond."""
First = TypeVar("First", bound=Message)


def first_message(channel: MessageChannel, kinds: tuple[type[First], ...], timeout_s: float) -> First | None:
    """Return the first message of a new connection; None, and the connection closed, if it is none of `kinds`."""

    def only(message: AnyMessage) -> None:
        if not isinstance(message, kinds) or message.tensors:
            raise PeerError(f"{type(message).__name__} from an unknown peer")

    try:
        received = channel.receive(only, idle_s=timeout_s)
    except PeerError:
        received = None
    if received is None or not isinstance(received[0], kinds):
        channel.close()
        return None
    return received[0]


class Acceptor:
    """Admits peers that send the run's secret name and a device's name that is free, and receives their messages.

    Every connection has its own thread: an unknown peer delays nobody, whether it is silent or sends anything.
    """

    replaces: ClassVar[bool] = False
    """Whether a new connection of a device replaces its old one, once the old one's messages are handled; else it is
    refused."""

    def __init__(
        self,
        run: str,
        devices: Collection[str],
        *,
        on_message: OnMessage,
        guard: Callable[[str, AnyMessage], None],
        timeout_s: float,
        landing: Callable[[str], Landing] = lambda _: in_host_memory,
    ) -> None:
        """`guard` refuses (PeerError) a message before its tensors are received, which then come to the device's
        `landing`. Threads call all three."""
        self._run = run
        self._devices = devices
        self._on_message = on_message
        self._guard = guard
        self._landing = landing
        self._timeout_s = timeout_s
        self._admitting = threading.Lock()
        self._channels: dict[str, MessageChannel] = {}
        self._endings: dict[MessageChannel, threading.Event] = {}  # set when no more messages of a connection follow
        self._banned: set[str] = set()
        self._closed = False

    def channel(self, device: str) -> MessageChannel | None:
        """The connection of a device; None where it was forgotten."""
        return self._channels.get(device)

    def forget(self, device: str, *, permanent: bool = False) -> None:
        """Hang up; nothing more is heard from that connection. The device may join again, if not `permanent`."""
        with self._admitting:
            channel = self._channels.pop(device, None)
            if permanent:
                self._banned.add(device)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        with self._admitting:
            self._closed = True
        for channel in self._channels.values():
            channel.close()

    def on_connection(self, channel: MessageChannel) -> None:
        """Receive from a new connection: from a device until it leaves, from an unknown peer only the first message."""
        join = first_message(channel, (JoinRun,), self._timeout_s)
        if join is not None:
            self.admit(channel, join)

    def admit(self, channel: MessageChannel, join: JoinRun) -> None:
        """Do the same as `on_connection`, for a connection that has said its first message."""
        if not self._takes(channel, join):
            channel.close()  # nothing of the run has changed
            return
        try:
            self._receive(channel, join)
        finally:
            self._endings.pop(channel).set()

    def _receive(self, channel: MessageChannel, join: JoinRun) -> None:
        device = join.device
        channel.other = f"device {device!r}"
        self._tell(channel, (device, join, []))
        check = limited(AT_WORK, lambda message: self._check(device, message))
        landing = self._landing(device)
        try:
            while (received := channel.receive(check, idle_s=self._timeout_s, landing=landing)) is not None:
                self._tell(channel, (device, *received))
                del received  # while it waits, the link must not keep tensors alive
            self._tell(channel, (device, None, []))
        except Exception as e:  # the receiver of the callback decides
            self._tell(channel, (device, e, []))

    def _tell(self, channel: MessageChannel, heard: ReceivedMessage) -> None:
        then: Callable[[], None] | None = None
        with self._admitting:
            if self._channels.get(heard[0]) is channel:
                then = self._on_message(heard)
        if then is not None:
            then()

    def _takes(self, channel: MessageChannel, join: JoinRun) -> bool:
        if join.run != self._run or join.device not in self._devices:
            return False
        with self._admitting:
            former = self._channels.get(join.device)
            ended = None if former is None else self._endings.get(former)
        if former is not None and not self.replaces:
            return False
        if former is not None and ended is not None:
            former.close()
            if not ended.wait(self._timeout_s):
                return False
        with self._admitting:
            if self._closed or join.device in self._banned or self._channels.get(join.device) is not former:
                return False
            self._channels[join.device], self._endings[channel] = channel, threading.Event()
            return True

    def _check(self, device: str, message: AnyMessage) -> None:
        if message.run != self._run:
            raise PeerError("sent a frame of another run")
        self._guard(device, message)
