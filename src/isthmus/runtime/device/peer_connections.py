"""Where a device is, and how the devices of a plan get a connection for each pair: the lower stage dials, the higher
one accepts. Of two devices of which one gives state, the one that gets it dials.

A device listens for as long as its process lives. Who dials says for which plan epoch: one that this device has not
come to yet waits, one that is over is shut out.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping

from isthmus.errors import PeerError
from isthmus.protocol.run_messages import PeerPath
from isthmus.runtime.device.tasklets import ComputeTurns
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.identity.blinded_digests import ONE_OWNER
from isthmus.runtime.messages.assignment import Assignment, FollowHello, Neighbour, Peer, ServeStage, StateHello
from isthmus.runtime.messages.run import Hello, StreamHello
from isthmus.runtime.processes.place import DevicePlace
from isthmus.runtime.transport.acceptor import first_message
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.multi_stream import StreamAssembler
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute, RelayStandby


class Endpoint(DevicePlace, frozen=True, kw_only=True):
    """Where a device is, and how it talks to others."""

    device: str
    identity: Identity | None = None  # with one all connections are TLS; without, plain TCP
    sharing: ComputeTurns | None = None  # with its other stages, where it may get several

    @property
    def data_key(self) -> bytes:
        """The key that blinds this device's digests of samples."""
        return ONE_OWNER if self.identity is None else self.identity.data_key()


Give = Callable[
    [StateHello | FollowHello, SocketChannel], None
]  # gives state over a new connection, in the connection's own thread


def give_none(hello: StateHello | FollowHello, channel: SocketChannel) -> None:
    channel.close()


MOST_WAITING = 256  # connections that nobody has asked for yet
LOOK_S = 0.1  # how often to look whether the meeting is called off


class PeerConnections:
    """The listening side of one device."""

    def __init__(
        self,
        listener: Listener,
        run: str,
        dialer: PeerDialer,
        worker_id: str = "",
        near: Mapping[str, tuple[str, int]] = {},
        give: Give = give_none,
    ) -> None:
        """With an identity, other devices can also reach this one through the coordinator's relay, by `worker_id`.
        `near` holds the addresses inside this device at which its other workers listen. `give` answers devices that ask
        for state."""
        self._run = run
        self._dialer = dialer
        self._near = near
        self._give = give
        self._timeout_s = dialer.timeout_s
        self._assembler = StreamAssembler(dialer.timeout_s)
        self._arrived = threading.Condition()
        self._epoch = 0
        self._waiting: list[tuple[int, int, SocketChannel]] = []  # epoch and stage that each says it is for
        listener.start(self._on_connection)
        self._ways: dict[str, tuple[SocketChannel, bool, int]] = {}
        self._standby: RelayStandby | None = None
        if dialer.identity is not None:
            what = _relayed_to(run, worker_id)
            self._standby = RelayStandby(
                dialer, what, lambda found: listener.adopt(found, "relayed", self._on_connection)
            )

    def close(self) -> None:
        """No longer wait for relayed connections."""
        if self._standby is not None:
            self._standby.close()

    def _on_connection(self, channel: SocketChannel) -> None:
        hello = first_message(channel, (Hello, StateHello, FollowHello, StreamHello), self._timeout_s)
        if isinstance(hello, StreamHello):
            try:
                stream_group = self._assembler.add(channel, hello)
            except PeerError:
                channel.close()
                return
            if stream_group is None:
                return
            channel, hello = (
                stream_group,
                first_message(stream_group, (Hello, StateHello, FollowHello), self._timeout_s),
            )
        if hello is None:
            return
        if isinstance(hello, StateHello | FollowHello):
            self._give(hello, channel)
            return
        with self._arrived:
            welcome = hello.run == self._run and hello.epoch >= self._epoch
            if welcome and len(self._waiting) < MOST_WAITING:
                self._waiting.append((hello.epoch, hello.stage, channel))
                self._arrived.notify_all()
                return
        channel.close()

    def _take(self, epoch: int) -> list[tuple[int, SocketChannel]]:
        """Take who has come for this epoch; who came for an older one is shut out."""
        with self._arrived:
            self._epoch = epoch
            old = [channel for e, _, channel in self._waiting if e < epoch]
            taken = [(stage, channel) for e, stage, channel in self._waiting if e == epoch]
            self._waiting = [entry for entry in self._waiting if entry[0] > epoch]
        for channel in old:
            channel.close()
        return taken

    def connect(
        self, assignment: Assignment | ServeStage, called_off: Callable[[], bool] = lambda: False
    ) -> dict[int, SocketChannel]:
        """One connection per neighbour. PeerError when a neighbour does not come, or when it is called off.

        With an identity both sides must be the devices that the assignment names.
        """
        found: dict[int, SocketChannel] = {}
        self._ways.clear()
        try:
            for neighbour in assignment.neighbours:
                if neighbour.stage > assignment.stage:
                    found[neighbour.stage] = self._dial(neighbour, assignment)
            self._await(assignment, found, called_off)
        except Exception:
            for channel in found.values():
                channel.close()
            raise
        return found

    def paths(self) -> tuple[PeerPath, ...]:
        """Return how the devices were reached that were dialled last."""
        return tuple(
            PeerPath(device=device, relayed=relayed, latency_s=channel.latency_s, streams=streams, bbr=channel.bbr)
            for device, (channel, relayed, streams) in self._ways.items()
        )

    def reach(self, peer: Peer) -> tuple[SocketChannel, bool]:
        """A connection to another device, by whatever way there is, and whether it is relayed. PeerError if none. Any
        thread."""
        host, port = self._near.get(peer.device, (peer.host, peer.port))
        return self._dialer.dial(
            PeerRoute(
                run=_relayed_to(self._run, peer.device),
                other=f"device {peer.device!r}",
                host=host,
                port=port,
                id=peer.id,
                streams=peer.streams,
            )
        )

    def _dial(self, neighbour: Neighbour, assignment: Assignment | ServeStage) -> SocketChannel:
        channel, relayed = self.reach(neighbour)
        self._ways[neighbour.device] = (channel, relayed, neighbour.streams)
        channel.send(Hello(run=assignment.run, epoch=assignment.epoch, stage=assignment.stage))
        return channel

    def _await(
        self, assignment: Assignment | ServeStage, found: dict[int, SocketChannel], called_off: Callable[[], bool]
    ) -> None:
        neighbours = {n.stage: n for n in assignment.neighbours}
        deadline_s = time.monotonic() + assignment.timeout_s
        while missing := set(neighbours) - found.keys():
            absent = ", ".join(repr(neighbours[s].device) for s in sorted(missing))
            for stage, channel in self._take(assignment.epoch):
                if stage in missing and stage < assignment.stage and is_peer(channel.party, neighbours[stage]):
                    channel.other = f"device {neighbours[stage].device!r}"
                    found[stage] = channel
                    missing.discard(stage)
                else:
                    channel.close()  # one who is here already, or is another device
            if not missing:
                return
            if called_off():
                raise PeerError(f"device {absent}: the plan was given up before it connected")
            if time.monotonic() >= deadline_s:
                raise PeerError(f"device {absent}: did not connect for {assignment.timeout_s:g} s")
            with self._arrived:
                if not any(epoch == assignment.epoch for epoch, _, _ in self._waiting):
                    self._arrived.wait(LOOK_S)


def _relayed_to(run: str, worker_id: str) -> str:
    """The name that a relayed connection is for, as long as an id may be. Workers of one device share a key, so the key
    alone is not enough."""
    return hashlib.sha256(f"{run} {worker_id}".encode()).hexdigest()


def is_peer(party: Party | None, peer: Peer) -> bool:
    """Return whether who is at the other end of a connection is this device."""
    return party == (Party("device", peer.id) if peer.id else None)
