"""Two devices behind NATs of every kind: how they reach each other, how long that takes, and how fast the way is.

python benchmarks/nat/run.py [--quick] [--json PATH]       # needs root and nftables; four minutes

Coordinator and devices are in network namespaces of their own; the routers are the kernel's NAT. Links have 20 ms and
100 Mbit/s each way. Four megabytes go from one device to the other, over TLS, twice; the second time counts.
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.protocol.run_messages import Arrived
from isthmus.runtime.identity import Identity, decode_ticket
from isthmus.runtime.messages.run import Heartbeat, ToPeer
from isthmus.runtime.service.agent import join_fleet
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute, RelayStandby
from isthmus.training.layout import header_of, pack
from isthmus_testing.lab import COORDINATOR, KINDS, Home, Lab, inside, nat_unavailable

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

FIGURES = Path(__file__).parent / "results" / "latest.json"
LINK = Link(0.02, 12.5e6)
PLACES = ("oslo", "porto")
SENT_BYTES = 4_000_000
REPEATS = 3
TRIPS = 5
TIMEOUT_S = 20.0
RUN = "nat"


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """From a device behind one NAT to a device behind another. Medians over the repeats."""

    near: str
    far: str
    note: str
    relayed: bool
    connect_s: float
    """From the wish to an authenticated connection."""
    round_trip_s: float
    """Of a small message."""
    bytes_per_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    latency_s: float
    bandwidth_bytes_per_s: float
    ways: tuple[Way, ...]


class Peer:
    """A device that joined, listens, and waits at the coordinator. Made in its network."""

    def __init__(self, service: FleetCoordinator, address: tuple[str, int], folder: Path, *, direct: bool) -> None:
        name = folder.name
        join_fleet(decode_ticket(service.state.ticket()), {name: folder}, TIMEOUT_S)
        identity = Identity(folder)
        self.id = identity.id
        self.dialer = PeerDialer(coordinator=address, identity=identity, timeout_s=TIMEOUT_S, direct=direct)
        self.came: queue.SimpleQueue[SocketChannel] = queue.SimpleQueue()
        self.listener = Listener("0.0.0.0", identity=identity, timeout_s=TIMEOUT_S)
        self.listener.start(self.came.put)
        self.standby = RelayStandby(self.dialer, RUN, lambda near: self.listener.adopt(near, "peer", self.came.put))

    def close(self) -> None:
        self.standby.close()
        self.listener.close()


def main() -> None:
    options = options_of(__doc__, FIGURES, "two kinds of NAT").parse_args()
    kinds = ("port-restricted", "symmetric") if options.quick else KINDS
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=1e9, memory_bytes=1 << 30) for n in PLACES)
    with Lab(Fleet(name="homes", devices=devices, links=Links(default=LINK)), coordinator_link=LINK) as lab:
        if reason := nat_unavailable(lab):
            sys.exit(reason)
        with serving(lab) as (service, address):
            ways = [two_homes(lab, service, address, near, far) for near in kinds for far in kinds]
            ways += special(lab, service, address)
    found = Figures(
        machine=machine(), latency_s=LINK.latency_s, bandwidth_bytes_per_s=LINK.bandwidth_bytes_per_s, ways=tuple(ways)
    )
    Console(width=120).print(table(found))
    write_figures(options.json, found)


@contextlib.contextmanager
def serving(lab: Lab) -> Generator[tuple[FleetCoordinator, tuple[str, int]]]:
    """The coordinator, at its own place."""
    host = lab.addresses[COORDINATOR]
    with tempfile.TemporaryDirectory() as folder:
        state = FleetState(Path(folder) / "fleet")

        def opened() -> FleetCoordinator:
            service = FleetCoordinator(state, host, 0, timeout_s=TIMEOUT_S, log=lambda _: None)
            state.listens_at(((host, service.port),))
            service.start()
            return service

        with inside(lab.network(COORDINATOR), opened) as service:
            yield service, (host, service.port)


def two_homes(
    lab: Lab, service: FleetCoordinator, address: tuple[str, int], near: str, far: str, *, ipv6: bool = False
) -> Way:
    with (
        Home(lab, "oslo", near, ipv6=ipv6) as oslo,  # pyright: ignore[reportArgumentType]
        Home(lab, "porto", far, ipv6=ipv6) as porto,  # pyright: ignore[reportArgumentType]
    ):
        note = "IPv6" if ipv6 else ""
        return measured(service, address, (oslo.network(), porto.network()), (near, far), note)


def special(lab: Lab, service: FleetCoordinator, address: tuple[str, int]) -> list[Way]:
    found = [two_homes(lab, service, address, "symmetric", "symmetric", ipv6=True)]
    for hairpin in (True, False):
        with Home(lab, "oslo", "port-restricted", devices=2, hairpin=hairpin) as home:
            networks = home.network(0), home.network(1)
            note = "one router, " + ("hairpin" if hairpin else "no hairpin")
            found.append(measured(service, address, networks, ("port-restricted",) * 2, note))
    with Home(lab, "oslo", "open") as oslo, Home(lab, "porto", "open") as porto:
        networks = oslo.network(), porto.network()
        found.append(measured(service, address, networks, ("open", "open"), "relay only", direct=False))
    return found


def measured(
    service: FleetCoordinator,
    address: tuple[str, int],
    networks: tuple[str, str],
    kinds: tuple[str, ...],
    note: str,
    *,
    direct: bool = True,
) -> Way:
    """Between a device in each network."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        number = time.monotonic_ns()
        paths = [Path(folder) / f"{side}-{number}" for side in ("near", "far")]
        peers = [
            inside(network, lambda path=path: Peer(service, address, path, direct=direct))
            for network, path in zip(networks, paths, strict=True)
        ]
        for peer in peers:
            stack.callback(peer.close)
        near, far = peers
        # The private address is the same in all homes: dialled, it leads nowhere.
        route = PeerRoute(run=RUN, other="the other device", host="192.168.1.2", port=far.listener.port, id=far.id)
        trials = [once(near, far, route, networks[0]) for _ in range(REPEATS)]
        assert len({relayed for relayed, *_ in trials}) == 1, f"{kinds}: not always the same way"
    return Way(
        near=kinds[0],
        far=kinds[1],
        note=note,
        relayed=trials[0][0],
        connect_s=round(statistics.median(t[1] for t in trials), 3),
        round_trip_s=round(statistics.median(t[2] for t in trials), 4),
        bytes_per_s=round(statistics.median(t[3] for t in trials)),
    )


def once(near: Peer, far: Peer, route: PeerRoute, network: str) -> tuple[bool, float, float, float]:
    """Whether it is relayed; seconds to connect; of a round trip; bytes per second, once the connection is warm."""
    began_s = time.monotonic()
    ours, relayed = inside(network, lambda: near.dialer.dial(route))
    connect_s = time.monotonic() - began_s
    values = torch.zeros(SENT_BYTES // 4)
    message = ToPeer(run=RUN, tensors=(header_of("x", values),), body=Arrived(parcel="forward", source=0, item=0))
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(first_used, far)
        ours.send(message, [pack(values)])
        theirs = came.result()
        again = pool.submit(theirs.receive, idle_s=TIMEOUT_S)
        began_s = time.monotonic()
        ours.send(message, [pack(values)])
        assert again.result() is not None
        sent_s = time.monotonic() - began_s
    trips: list[float] = []
    for _ in range(TRIPS):
        began_s = time.monotonic()
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.send(Heartbeat(run=RUN))
            receiver.receive(idle_s=TIMEOUT_S)
        trips.append(time.monotonic() - began_s)
    ours.close()
    theirs.close()
    return relayed, connect_s, statistics.median(trips), SENT_BYTES / sent_s


def first_used(far: Peer) -> SocketChannel:
    """Of several connections that came about, the one that the other device took."""
    while True:
        channel = far.came.get(timeout=TIMEOUT_S)
        if channel.receive(idle_s=TIMEOUT_S) is not None:
            return channel


def table(found: Figures) -> Table:
    shown = Table(title=f"{found.latency_s * 1e3:.0f} ms and {found.bandwidth_bytes_per_s * 8e-6:.0f} Mbit/s each way")
    for heading in ("near", "far", "", "way", "connected after", "round trip", "Mbit/s"):
        shown.add_column(heading)
    for way in found.ways:
        kind = "relayed" if way.relayed else "direct"
        times = (f"{seconds * 1e3:.0f} ms" for seconds in (way.connect_s, way.round_trip_s))
        shown.add_row(way.near, way.far, way.note, kind, *times, f"{way.bytes_per_s * 8e-6:.0f}")
    return shown


if __name__ == "__main__":
    main()
