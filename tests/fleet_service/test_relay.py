"""Two devices of which one cannot dial the other: both connect at the same time, or the coordinator copies bytes that
it can neither read nor alter."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Generator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch

from isthmus.errors import PeerError
from isthmus.runtime.messages.run import RelayWait, StreamHello, ToPeer
from isthmus.runtime.service.status_file import read_status
from isthmus.runtime.transport import relay, rendezvous
from isthmus.runtime.transport.acceptor import first_message
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.multi_stream import StreamAssembler
from isthmus.runtime.transport.relay import RelayedLink
from isthmus.runtime.transport.rendezvous import RelayStandby, worth_dialling
from isthmus.training.layout import pack
from tests.runtime.channel_cases import parcel

from .parties import RUN, Fleet, ReachableDevice, soon

WORDS = "in the open this could be read"


@contextlib.contextmanager
def _devices(fleet: Fleet, folder: Path, *, direct: bool = False) -> Generator[tuple[ReachableDevice, ReachableDevice]]:
    near, far = (ReachableDevice(fleet, folder, name, direct=direct) for name in ("near", "far"))
    try:
        yield near, far
    finally:
        near.close()
        far.close()


class Tapped(socket.socket):
    """What the coordinator copies, seen; and altered once somebody wants it."""

    seen = b""
    flips = False

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:  # pyright: ignore
        got = super().recv_into(buffer)
        Tapped.seen += bytes(buffer[:got])
        if Tapped.flips and got:
            buffer[got // 2] ^= 1
        return got


@contextlib.contextmanager
def _tapped() -> Generator[type[Tapped]]:
    """On the coordinator's side of both connections."""
    honest = SocketChannel.bare
    Tapped.seen, Tapped.flips = b"", False

    def bare(channel: SocketChannel) -> socket.socket:
        found = honest(channel)
        coordinators = channel.party is not None and channel.party.role == "device"
        return Tapped(fileno=found.detach()) if coordinators else found

    with mock.patch.object(SocketChannel, "bare", bare):
        yield Tapped


def test_frames_cross_the_coordinator_and_it_cannot_read_them(fleet: Fleet, tmp_path: Path) -> None:
    tensor = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8)
    with _tapped() as tap, _devices(fleet, tmp_path) as (near, far):
        ours, relayed = near.dialer.dial(far.route())
        theirs = far.came.get(timeout=60)
        assert relayed and theirs.party is not None and theirs.party.id == near.identity.id
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.send(parcel(7, tensor), [pack(tensor)])
            came = receiver.receive(idle_s=5)
            assert came is not None and isinstance(came[0], ToPeer) and torch.equal(came[1][0], tensor)
        assert len(tap.seen) > 6_000_000 and RUN.encode() not in tap.seen and bytes(tensor[:64]) not in tap.seen
        found: list[RelayedLink] = []

        def told() -> bool:
            current_status = read_status(fleet.state.folder)
            found[:] = current_status.relayed if current_status is not None else ()
            return any(link.carried_bytes > 6_000_000 for link in found)

        soon(told)
        (link,) = found
        assert link.devices == ("near", "far")
        assert link.latency_s is None or 0 < link.latency_s < 1
        ours.close()
        assert theirs.receive(idle_s=5) is None, "the end is relayed too"
        again, _ = near.dialer.dial(far.route())  # it has parked anew
        again.close()


def test_a_relay_that_alters_a_byte_is_noticed(fleet: Fleet, tmp_path: Path) -> None:
    with _tapped() as tap, _devices(fleet, tmp_path) as (near, far):
        ours, _ = near.dialer.dial(far.route())
        theirs = far.came.get(timeout=60)
        tap.flips = True
        ours.send(parcel(7, torch.zeros(100)), [pack(torch.zeros(100))])
        with pytest.raises(PeerError, match=r"(?i)mac"):
            theirs.receive(idle_s=5)
        theirs.close()
        ours.close()


def test_a_relay_that_leads_to_somebody_else_is_noticed(fleet: Fleet, tmp_path: Path) -> None:
    honest = relay.Relay._requested  # pyright: ignore[reportPrivateUsage]

    def false(self: relay.Relay, asked: relay.RelayConnect, id: str, near: object) -> object:
        return honest(self, relay.RelayConnect(run=asked.run, id=id), id, near)  # pyright: ignore  # back to who asked

    with (
        mock.patch.object(relay.Relay, "_requested", false),
        _devices(fleet, tmp_path) as (near, far),
        pytest.raises(PeerError, match=f"identifies itself as device {near.identity.id}"),
    ):
        near.dialer.dial(far.route())


def test_the_direct_way_is_taken_where_there_is_one(fleet: Fleet, tmp_path: Path) -> None:
    with _devices(fleet, tmp_path) as (near, far):
        channel, relayed = near.dialer.dial(far.route(direct=True))
        assert not relayed
        channel.close()
        far.came.get(timeout=60).close()


def test_devices_that_connect_at_the_same_time_need_no_relay(fleet: Fleet, tmp_path: Path) -> None:
    with _devices(fleet, tmp_path, direct=True) as (near, far):
        for _ in range(3):
            ours, relayed = near.dialer.dial(far.route())
            ours.send(parcel(7, torch.ones(3)), [pack(torch.ones(3))])
            theirs = far.came.get(timeout=60)
            while theirs.receive(idle_s=5) is None:  # one that `near` has not taken
                theirs = far.came.get(timeout=60)
            assert not relayed and theirs.party is not None and theirs.party.id == near.identity.id
            ours.close()
            assert theirs.receive(idle_s=5) is None


def test_one_device_that_takes_no_part_is_relayed(fleet: Fleet, tmp_path: Path) -> None:
    with _devices(fleet, tmp_path, direct=True) as (near, far):
        relay_only = msgspec.structs.replace(near.dialer, direct=False)
        channel, relayed = relay_only.dial(far.route())
        assert relayed
        channel.close()


def test_addresses_that_cannot_be_anothers_are_not_dialled() -> None:
    here = ("192.168.1.2", 5000)
    foreign = ["127.0.0.1", "::1", "0.0.0.0", "169.254.1.1", "fe80::1", "224.0.0.1", "ff02::1", "a name"]
    assert worth_dialling([(host, 80) for host in foreign], here) == []
    assert worth_dialling([("192.0.2.1", 0), ("192.0.2.1", 1 << 16)], here) == []
    assert worth_dialling([("192.0.2.1", 80), ("fd99::1", 80)], here) == [("192.0.2.1", 80), ("fd99::1", 80)]
    assert worth_dialling([("127.0.0.1", 80)], ("127.0.0.1", 5000)) == [("127.0.0.1", 80)]


def test_a_rendezvous_that_leads_to_somebody_else_is_not_taken(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "DIRECT_S", 0.5)
    with _devices(fleet, tmp_path, direct=True) as (near, far):
        other = ReachableDevice(fleet, tmp_path, "other")
        honest = rendezvous.worth_dialling
        monkeypatch.setattr(
            rendezvous, "worth_dialling", lambda found, here: honest([("127.0.0.1", other.listener.port)], here)
        )
        monkeypatch.setattr(rendezvous, "_listen", lambda *_: None)
        channel, relayed = near.dialer.dial(far.route())
        assert relayed and channel.party is not None and channel.party.id == far.identity.id
        channel.close()
        other.close()


def test_a_device_at_the_same_address_that_is_another_is_not_taken(fleet: Fleet, tmp_path: Path) -> None:
    """Networks of two homes often have the same addresses."""
    with _devices(fleet, tmp_path, direct=True) as (near, far):
        wrong = msgspec.structs.replace(far.route(), port=near.listener.port)
        channel, relayed = near.dialer.dial(wrong)
        assert not relayed and channel.party is not None and channel.party.id == far.identity.id
        channel.close()


@pytest.mark.parametrize("direct", [False, True])
def test_several_streams(fleet: Fleet, tmp_path: Path, direct: bool) -> None:
    with _devices(fleet, tmp_path) as (near, far):
        ours, relayed = near.dialer.dial(far.route(direct=direct, streams=3))
        assert relayed is not direct
        assembler, theirs = StreamAssembler(5.0), None
        while theirs is None:
            stream = far.came.get(timeout=60)
            said = first_message(stream, (StreamHello,), 5.0)
            assert said is not None
            theirs = assembler.add(stream, said)
        tensor = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8)
        ours.send(parcel(7, tensor), [pack(tensor)])
        found = theirs.receive(idle_s=5)
        assert found is not None and torch.equal(found[1][0], tensor)
        assert theirs.party is not None and theirs.party.id == near.identity.id
        ours.close()
        theirs.close()


def _waits(fleet: Fleet, device: ReachableDevice, before: int) -> SocketChannel:
    """One more connection of the device that waits at the relay, and says nothing."""
    channel, _ = device.dialer.coordinator_channel()
    channel.send(RelayWait(run=RUN))
    soon(lambda: fleet.service.relay.waiting(RUN, device.identity.id) == before + 1)
    return channel


def test_a_request_that_is_refused_leaves_nothing_at_the_relay(fleet: Fleet, tmp_path: Path) -> None:
    """Each for a run of its own: beyond the most that may wait, or with an id that is none."""
    with _devices(fleet, tmp_path) as (_, far):
        far.standby.close()
        soon(lambda: not fleet.service.relay.waiting(RUN, far.identity.id))
        asked = [*(f"run {n}" for n in range(relay.MOST_WAITING + 4)), *(f"{n}" * 65 for n in range(3))]
        channels = [far.dialer.coordinator_channel()[0] for _ in asked]
        for n, (run, channel) in enumerate(zip(asked, channels, strict=True)):
            channel.send(RelayWait(run=run))
            if n < relay.MOST_WAITING:
                soon(lambda waited=run: fleet.service.relay.waiting(waited, far.identity.id) == 1)
            else:
                with contextlib.suppress(PeerError):  # as TCP says it
                    assert channel.receive(idle_s=5) is None, "it waits"
        kept = fleet.service.relay._waiting_devices  # pyright: ignore[reportPrivateUsage]
        assert {run for run, id in kept if id == far.identity.id} == set(asked[: relay.MOST_WAITING])
        for channel in channels:
            channel.close()


def test_the_newest_connection_of_a_device_is_taken_that_is_not_closed(fleet: Fleet, tmp_path: Path) -> None:
    """A device whose address has changed waits again, long before the coordinator misses its old connection."""
    with _devices(fleet, tmp_path) as (near, far):
        far.standby.close()
        soon(lambda: not fleet.service.relay.waiting(RUN, far.identity.id))
        silent = _waits(fleet, far, 0)
        far.standby = RelayStandby(far.dialer, RUN, lambda found: far.listener.adopt(found, "relayed", far.came.put))
        soon(lambda: fleet.service.relay.waiting(RUN, far.identity.id) == 2)
        _waits(fleet, far, 2).close()
        channel, relayed = near.dialer.dial(far.route())
        assert relayed
        channel.close()
        silent.close()


def test_who_is_not_there_is_named(fleet: Fleet, tmp_path: Path) -> None:
    with mock.patch.object(relay, "WAIT_S", 0.2), _devices(fleet, tmp_path) as (near, far):
        far.close()
        with pytest.raises(PeerError, match=r"device 'far': does not listen; relayed by the coordinator: device .* no"):
            near.dialer.dial(far.route())


def test_a_revoked_device_loses_what_was_relayed(fleet: Fleet, tmp_path: Path) -> None:
    with _devices(fleet, tmp_path) as (near, far):
        ours, _ = near.dialer.dial(far.route())
        theirs = far.came.get(timeout=60)
        fleet.state.roster.revoke("near", time.time())
        with contextlib.suppress(PeerError):
            assert theirs.receive(idle_s=10) is None
        ours.close()
        theirs.close()
        with pytest.raises(PeerError):
            near.dialer.dial(far.route())
