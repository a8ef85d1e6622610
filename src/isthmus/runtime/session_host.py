"""Drives a session over real connections and by the clock: one host for every program."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from torch import Tensor

from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import Landing, MessageChannel, SocketChannel, in_host_memory
from isthmus.runtime.transport.lanes import SendLane, Sent
from isthmus.runtime.transport.message_sender import HeartbeatReceiver, start_heartbeats
from isthmus.session.session import CLOSED, SOON_S, TICK_S, Observation, Session

SessionT = TypeVar("SessionT", bound=Session)


class SessionHost(Generic[SessionT]):
    """Takes connections, and tells the session what happens there, in the thread that calls `drive`. A subclass is the
    port of one program."""

    def __init__(
        self,
        session: SessionT,
        run: str,
        devices: Collection[str],
        *,
        timeout_s: float,
        acceptor: type[Acceptor] = Acceptor,
    ) -> None:
        """`run`: the secret name under which these devices come."""
        self.session = session
        self.run = run
        self.timeout_s = timeout_s
        self.devices = DevicesAtWork()
        self.lanes: dict[str, SendLane] = {}  # to the workers that are connected
        self.addresses: dict[str, Address] = {}
        self.over = threading.Event()  # set when nothing follows
        self.inbox: queue.SimpleQueue[ReceivedMessage | Callable[[], None]] = queue.SimpleQueue()
        self.acceptor = acceptor(
            run, devices, on_message=self.on_message, guard=self.guard, timeout_s=timeout_s, landing=self.landing
        )
        """Takes the devices' connections."""

    # What a program's host decides

    def guard(self, device: str, message: AnyMessage) -> None:
        """Refuse (PeerError) what no device sends, before its tensors are received. Any thread."""
        raise NotImplementedError

    def landing(self, device: str) -> Landing:
        """Return where a device's tensors go. Any thread."""
        return in_host_memory

    def on_message(self, received: ReceivedMessage) -> Callable[[], None] | None:
        """Have the thread that drives take the acceptor's message."""
        self.inbox.put(received)

    def joined(self, device: str, join: JoinRun) -> None:
        """A worker is connected."""
        raise NotImplementedError

    def received(self, device: str, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        """A worker sent a message that is no heartbeat."""
        raise NotImplementedError

    def takes_offer(self, device: str) -> bool:
        """Return whether the session may know of a device that could work."""
        return True

    @property
    def done(self) -> bool:
        """Return whether nothing more is decided."""
        return self.session.over

    def receivers(self) -> Iterable[HeartbeatReceiver]:
        """Where heartbeats go. Any thread."""
        return list(self.lanes.values())

    def deciding(self) -> AbstractContextManager[None]:
        """Inside, the session hears something."""
        return contextlib.nullcontext()

    def farewell(self) -> None:
        """The session is over: what waits for the workers is sent."""
        for lane in self.lanes.values():
            lane.close()

    # What it does

    def call(self, device: str) -> None:
        """Ask a device of the fleet to join."""
        self.devices.call(device)

    def drive(self, devices: DevicesAtWork | None = None, stop: Stop | None = None) -> None:
        """Until the session is over, and close. `devices` are at work; without them they come by themselves. `stop`
        ends the session as its program says; without it Ctrl-C is somebody else's."""
        self.devices = devices or self.devices
        try:
            with contextlib.nullcontext() if stop is None else stop.calls(lambda: self.inbox.put(self.session.stop)):
                self.decide()
            self.farewell()
        finally:
            self.close()

    def decide(self) -> None:
        """Until the session is over."""
        start_heartbeats(self.run, self.timeout_s, self.over, self.receivers)
        looked_s = float("-inf")
        while not self.done:
            taken, due_s = None, looked_s + (SOON_S if self.session.suspects else TICK_S)
            if (decides_s := self.session.due_s) is not None and decides_s > looked_s:
                due_s = min(due_s, decides_s)
            with contextlib.suppress(queue.Empty):
                taken = self.inbox.get(timeout=max(0.0, due_s - time.monotonic()))
            with self.deciding():
                if taken is not None and not self.done:
                    self.take(taken)
                now_s = time.monotonic()
                if not self.done and (self.session.urgent or now_s >= due_s):
                    looked_s = now_s
                    self.look()

    def look(self) -> None:
        """Tell the session of the devices now."""
        seen = self._observation()
        self.session.clock(time.monotonic())
        self.session.looked(seen)

    def close(self) -> None:
        self.over.set()
        self.acceptor.close()

    def send(self, device: str, message: AnyMessage, tensors: Sequence[Sent] = ()) -> None:
        """To one who may have gone meanwhile."""
        if (lane := self.lanes.get(device)) is not None:
            lane.put(message, tensors)

    def hang_up(self, device: str, *, permanent: bool = False) -> None:
        """Nothing more is heard from this connection. `permanent`: nor from another of the device."""
        lane = self.lanes.pop(device, None)
        self.acceptor.forget(device, permanent=permanent)
        if lane is not None:
            lane.close(0.0)

    def take(self, taken: ReceivedMessage | Callable[[], None]) -> None:
        self.session.clock(time.monotonic())
        if not isinstance(taken, tuple):
            taken()
            return
        device, message, tensors = taken
        if isinstance(message, JoinRun):
            if (channel := self.acceptor.channel(device)) is not None:  # else it was rejected meanwhile
                self.connect(device, message, channel)
        elif device not in self.session.connected or isinstance(message, Heartbeat):
            return  # of one that was fenced meanwhile, or nothing new
        elif message is None or isinstance(message, Exception):
            reason = CLOSED if message is None else str(message).removeprefix(f"device {device!r}: ")
            self.session.disconnected(device, reason)
            self.look()
        else:
            self.received(device, message, tensors)

    def connect(self, device: str, join: JoinRun, channel: MessageChannel) -> None:
        assert isinstance(channel, SocketChannel), "devices connect by sockets"
        self.lanes[device] = SendLane(channel, timeout_s=self.timeout_s)
        party = channel.party.id if channel.party is not None else ""
        self.addresses[device] = Address(join.host, join.port, party)
        self.joined(device, join)

    def _observation(self) -> Observation:
        devices = self.devices
        known = self.session.concerned
        return Observation(
            starting=frozenset(filter(devices.starting, known)),
            ended=devices.ended(),  # after who runs: one that ends meanwhile is in both
            returning=frozenset(filter(devices.returns, known)),
            queued=frozenset(filter(self.takes_offer, devices.queued())),
            offers=frozenset(filter(self.takes_offer, devices.offers())),
            leaving=frozenset(devices.leaving()),
        )
