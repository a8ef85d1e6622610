"""The coordinator's part where one device cannot dial another: it tells both where they are and when to connect to each
other at the same time; if that fails, it copies bytes between two connections of theirs.

    A ── asks for B ──► coordinator ◄── waits ── B      B waits before anybody asks
    A ◄── address of B, when ─┴─ address of A, when ──► B      as the coordinator sees them, beyond the devices' NATs
    A ◄──────────────── TLS ────────────────► B      if a direct connection comes about: A hangs up here

Else A asks to be relayed, on the same two connections:

    A ── TLS ──► coordinator ◄── TLS ── B
    A ◄─────────── bytes ─────────────► B       TLS with the coordinator ends on both connections; what it copies from
                                                then on is TLS between A and B, who verify each other

So it can neither read nor alter, and encrypts nothing twice. (Rejected: TLS inside of TLS, at twice the work for each
byte; a port of its own for relayed connections, as nothing but TLS shall be parsed before it is known who comes.)
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import msgspec

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import MOST_ADDRESSES, Heartbeat, RelayConnect, RelayReady, RelayWait, Rendezvous
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.relay_status import RelayedLink
from isthmus.runtime.transport.tcp import least_round_trip_s, round_trip_s

COPY_BYTES = 1 << 18
MOST_WAITING = 8  # waiting connections of one device. It opens the next one when one is taken.
WAIT_S = 3.0
"""How long a request waits for the other device. A device starts to wait before others learn of it, so it is there
unless it is gone."""
MEET_S = 15.0  # how long devices may take to find out whether there is a direct way
MOST_STREAMS = 64  # relayed connections at once, of one device


class _End(msgspec.Struct, frozen=True):
    """The addresses and the latency of one device, as the other one must know them."""

    addresses: tuple[tuple[str, int], ...]  # empty where no direct connection may be tried
    latency_s: float  # from the coordinator, one way

    def rendezvous(self, run: str, other: _End) -> Rendezvous:
        """For this device, with the `other` one."""
        return Rendezvous(run=run, addresses=other.addresses, after_s=max(0.0, other.latency_s - self.latency_s))


class _RelayRequest:
    """A request for a waiting device, by the thread of the device that asked."""

    def __init__(self, near: _End) -> None:
        self.near = near
        self.far: queue.SimpleQueue[_End | None] = queue.SimpleQueue()
        """The end of the waiting device, once it has been notified; None if it is gone."""
        self.relay: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Whether to relay; False when there is nothing left to do."""
        self.answers: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()  # the connection to relay to

    def cancel(self) -> None:
        self.far.put(None)
        self.answers.put(None)


class _WaitingDevice:
    def __init__(self, channel: SocketChannel) -> None:
        self.channel = channel
        self.requests: queue.SimpleQueue[_RelayRequest] = queue.SimpleQueue()


class _Stream:
    """Two sockets, and the bytes copied between them."""

    def __init__(self, ids: tuple[str, str], names: tuple[str, str], ends: tuple[socket.socket, socket.socket]) -> None:
        self.ids = ids
        self._names = names
        self._ends = ends
        self._carried = [0, 0]

    def run(self) -> None:
        """Until both directions have ended."""
        back = threading.Thread(target=self._copy, args=(1,), name="relay", daemon=True)
        back.start()
        self._copy(0)
        back.join()
        self.close()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _copy(self, source: int) -> None:
        near, far = self._ends[source], self._ends[1 - source]
        buffer = memoryview(bytearray(COPY_BYTES))
        try:
            while got := near.recv_into(buffer):
                far.sendall(buffer[:got])
                self._carried[source] += got
            far.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def current_status(self) -> RelayedLink:
        trips = [round_trip_s(end) for end in self._ends]
        known = [trip for trip in trips if trip is not None]
        return RelayedLink(
            devices=self._names,
            carried_bytes=sum(self._carried),
            latency_s=sum(known) / 2 if len(known) == len(trips) else None,
        )


class Relay:
    """Pairs connections. Each is served in the thread that it came with."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting_devices: dict[tuple[str, str], list[_WaitingDevice]] = {}
        """Waiting devices by run and id, the newest last; none where no device waits."""
        self._streams: set[_Stream] = set()

    def serve(self, channel: SocketChannel, first: RelayWait | RelayConnect, names: dict[str, str]) -> None:
        """Until the connection ends. `names` are those of devices by id. OSError, PeerError."""
        assert channel.party is not None, "the listener admits no unknown peer"
        if isinstance(first, RelayWait):
            self._wait_for_relay(channel, first, channel.party.id)
        else:
            self._reach(channel, first, channel.party.id, names)

    def links(self) -> list[RelayedLink]:
        with self._changed:
            streams = list(self._streams)
        return sorted((stream.current_status() for stream in streams), key=lambda link: link.devices)

    def waiting(self, run: str, id: str) -> int:
        """Connections of a device that wait for others."""
        with self._changed:
            return len(self._waiting_devices.get((run, id), ()))

    def cut(self, id: str) -> None:
        """Whatever leads to or from this device."""
        with self._changed:
            streams = [stream for stream in self._streams if id in stream.ids]
        for stream in streams:
            stream.close()

    def close(self) -> None:
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def _wait_for_relay(self, channel: SocketChannel, asked: RelayWait, id: str) -> None:
        run = asked.run
        waiting_device = _WaitingDevice(channel)
        with self._changed:
            places = self._waiting_devices.get((run, id), [])
            here = [waits for waits in places if not waits.channel.hung_up]
            others = sum(len(found) for (_, of), found in self._waiting_devices.items() if of == id) - len(places)
            if others + len(here) >= MOST_WAITING:  # nothing is kept of a request that is refused
                raise PeerError(f"{channel.other}: has {MOST_WAITING} connections waiting at the relay already")
            self._waiting_devices[run, id] = [*here, waiting_device]
            self._changed.notify_all()
        request: _RelayRequest | None = None
        try:
            request = self._awaited(channel, waiting_device)
            if request is None or not self._meets(channel, asked, request):
                return
            channel.send(RelayReady(run=run))
            while not isinstance(said := _said(channel, self._timeout_s), RelayReady):
                if said is None:
                    raise PeerError(f"{channel.other}: closed a requested connection")
            request.answers.put(channel.bare())
        except (OSError, PeerError):
            if request is not None:
                request.cancel()
            raise
        finally:
            self._leave(run, id, waiting_device)

    def _meets(self, channel: SocketChannel, asked: RelayWait, request: _RelayRequest) -> bool:
        """Return whether to relay, after both devices had the time to connect directly."""
        far = _end(channel, asked)
        if far.addresses and request.near.addresses:
            channel.send(far.rendezvous(asked.run, request.near))
        request.far.put(far)
        with contextlib.suppress(queue.Empty):
            return request.relay.get(timeout=max(self._timeout_s, MEET_S))
        return False

    def _awaited(self, channel: SocketChannel, waiting_device: _WaitingDevice) -> _RelayRequest | None:
        """Until somebody wants it; meanwhile both sides see that the other is there. None when it leaves."""
        while True:
            try:
                return waiting_device.requests.get(timeout=self._timeout_s / 4)
            except queue.Empty:
                channel.send(Heartbeat(run=""))
                if _said(channel, self._timeout_s) is None:
                    return None

    def _leave(self, run: str, id: str, waiting_device: _WaitingDevice) -> None:
        with self._changed:
            places = self._waiting_devices.get((run, id), [])
            if waiting_device in places:
                places.remove(waiting_device)
            if not places:
                self._waiting_devices.pop((run, id), None)
        with contextlib.suppress(queue.Empty):  # somebody who came at the last moment
            while True:
                waiting_device.requests.get_nowait().cancel()

    def _reach(self, channel: SocketChannel, asked: RelayConnect, id: str, names: dict[str, str]) -> None:
        far = None
        if (found := self._requested(asked, id, _end(channel, asked))) is not None:
            request, end = found
            relays = False
            try:
                relays = self._asks_for_relay(channel, asked.run, request, end)
            finally:
                request.relay.put(relays)
            if not relays:
                return
            with contextlib.suppress(queue.Empty):
                far = request.answers.get(timeout=WAIT_S)
        if far is None:
            failure = f"device {names.get(asked.id, asked.id)!r} has no connection here that could be relayed"
            channel.send(RelayReady(run=asked.run, failure=failure))
            return
        try:
            channel.send(RelayReady(run=asked.run))
            near = channel.bare()
        except (OSError, PeerError):
            far.close()
            raise
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pair = (names.get(id, id), names.get(asked.id, asked.id))
        stream = _Stream((id, asked.id), pair, (near, far))
        with self._changed:
            self._streams.add(stream)
        try:
            stream.run()
        finally:
            with self._changed:
                self._streams.discard(stream)

    def _asks_for_relay(self, channel: SocketChannel, run: str, request: _RelayRequest, far: _End) -> bool:
        """False for a device that has found a direct way, or has left."""
        if not (far.addresses and request.near.addresses):
            return True
        channel.send(request.near.rendezvous(run, far))
        return _said(channel, max(self._timeout_s, MEET_S)) is not None

    def _requested(self, asked: RelayConnect, id: str, near: _End) -> tuple[_RelayRequest, _End] | None:
        """A request that the wanted device has taken, which may be about to wait; None if it does not come."""
        deadline_s = time.monotonic() + WAIT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            request = _RelayRequest(near)
            with self._changed:
                if sum(id in stream.ids for stream in self._streams) >= MOST_STREAMS:
                    return None
                places = self._waiting_devices.get((asked.run, asked.id))
                if not places:
                    self._changed.wait(left_s)
                    continue
                # The newest: of an older one the device may have given up, or its address may have changed.
                waiting_device = places.pop()
                if waiting_device.channel.hung_up:
                    continue
                waiting_device.requests.put(request)
            with contextlib.suppress(queue.Empty):
                if (far := request.far.get(timeout=WAIT_S)) is not None:
                    return request, far
            request.relay.put(False)
        return None


def _end(channel: SocketChannel, asked: RelayWait | RelayConnect) -> _End:
    """OSError when the device is gone."""
    trip_s = least_round_trip_s(channel.connection)
    stated = [(host, port) for host, port in asked.addresses if ":" in host]  # of IPv4 only what is seen from here
    addresses = (channel.peer_address, *stated)[:MOST_ADDRESSES] if asked.direct else ()
    return _End(addresses, 0.0 if trip_s is None else trip_s / 2)


def _said(channel: SocketChannel, timeout_s: float) -> AnyMessage | None:
    """The next message of a waiting device; None if it closed the connection."""

    def check(message: AnyMessage) -> None:
        if not isinstance(message, Heartbeat | RelayReady) or message.tensors:
            raise PeerError(f"sent {type(message).__name__} on a connection that waits at the relay")

    received = channel.receive(check, idle_s=timeout_s)
    return None if received is None else received[0]
