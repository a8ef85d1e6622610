"""Drives a session over real connections and by the clock: one host for every program."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from isthmus.plans.worker_ids import device_of
from isthmus.runtime.coordinator.backend import DevicesAtWork, NoDevices
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.message_sender import start_heartbeats
from isthmus.session.session import TICK_S, Observation, Session


class SessionHost:
    """Takes connections, and tells the session what happens there, in the thread that calls `drive`. A subclass is the
    port of one program."""

    def __init__(self, session: Session, run: str, devices: Collection[str], *, timeout_s: float) -> None:
        """`run`: the secret name under which these devices come."""
        self.session = session
        self.run = run
        self.timeout_s = timeout_s
        self.devices: DevicesAtWork = NoDevices()
        self.lanes: dict[str, SendLane] = {}
        """To the workers that are connected."""
        self.addresses: dict[str, Address] = {}
        self.over = threading.Event()
        """Set when nothing follows."""
        self.inbox: queue.SimpleQueue[ReceivedMessage | Callable[[], None]] = queue.SimpleQueue()
        self.acceptor = Acceptor(run, devices, on_message=self.inbox.put, guard=self.guard, timeout_s=timeout_s)
        """Takes the devices' connections."""

    # What a program's host decides

    def guard(self, device: str, message: AnyMessage) -> None:
        """Refuse (PeerError) what no device sends, before its tensors are received. Any thread."""
        raise NotImplementedError

    def joined(self, device: str, join: JoinRun) -> None:
        """A worker is connected."""
        raise NotImplementedError

    def received(self, device: str, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        """A worker sent a message that is no heartbeat."""
        raise NotImplementedError

    def takes_offer(self, device: str) -> bool:
        """Whether the session may know of a device that could work."""
        return True

    # What it does

    def drive(self) -> None:
        """Until the session is over. `close` is to follow, whatever happens."""
        start_heartbeats(self.run, self.timeout_s, self.over, lambda: list(self.lanes.values()))
        looked_s = float("-inf")
        while not self.session.over:
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=TICK_S))
            now_s = time.monotonic()
            if self.session.urgent or now_s - looked_s >= TICK_S:
                looked_s = now_s
                seen = self._look()
                self.session.clock(time.monotonic())
                self.session.looked(seen)

    def close(self) -> None:
        self.over.set()
        self.acceptor.close()

    def send(self, device: str, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """To one who may have gone meanwhile."""
        if (lane := self.lanes.get(device)) is not None:
            lane.put(message, tensors)

    def hang_up(self, device: str, *, permanent: bool = False) -> None:
        """Nothing more is heard from this connection. `permanent`: nor from another of the device."""
        lane = self.lanes.pop(device, None)
        self.acceptor.forget(device, permanent=permanent)
        if lane is not None:
            lane.close(0.0)

    def _take(self, taken: ReceivedMessage | Callable[[], None]) -> None:
        self.session.clock(time.monotonic())
        if not isinstance(taken, tuple):
            taken()
            return
        device, message, tensors = taken
        if isinstance(message, JoinRun):
            self._connect(device, message)
        elif device not in self.lanes or isinstance(message, Heartbeat):
            return  # of one that was fenced meanwhile, or nothing new
        elif message is None:
            self.session.disconnected(device)
        elif isinstance(message, Exception):
            self.session.disconnected(device, str(message).removeprefix(f"device {device!r}: "))
        else:
            self.received(device, message, tensors)

    def _connect(self, device: str, join: JoinRun) -> None:
        channel = self.acceptor.channel(device)
        assert isinstance(channel, SocketChannel), "devices connect by sockets"
        self.lanes[device] = SendLane(channel, timeout_s=self.timeout_s)
        party = channel.party.id if channel.party is not None else ""
        self.addresses[device] = Address(join.host, join.port, party)
        self.joined(device, join)

    def _look(self) -> Observation:
        devices = self.devices
        known = {*map(device_of, self.lanes), *self.session.concerned}
        return Observation(
            starting=frozenset(filter(devices.starting, known)),
            ended=devices.ended(),  # after who runs: one that ends meanwhile is in both
            returning=frozenset(filter(devices.returns, known)),
            queued=frozenset(filter(self.takes_offer, devices.queued())),
            offers=frozenset(filter(self.takes_offer, devices.offers())),
            leaving=frozenset(devices.leaving()),
        )
