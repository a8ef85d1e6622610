"""The transport: what a framed channel costs over bare sockets, and TLS over that; how exact an emulated link is.

`python benchmarks/transport/run.py [--quick] [--json PATH]`

Throughput is between two processes over loopback TCP. A bare pair does `sendall` from one buffer and `recv_into`
another; a channel sends frames from a tensor and receives each into a fresh one; a secure channel does the same over
TLS 1.3 with both sides verified. Bursts of 64 MiB alternate on connections that stay open; medians of speeds and of
the ratios of bursts next to each other are shown.
An emulated link carries messages one at a time; its error is the time a message took less size / bandwidth + latency.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from isthmus.fleet import Link
from isthmus.protocol.run_messages import Arrived
from isthmus.runtime.identity import Authority, Identity, Party, Role
from isthmus.runtime.messages.run import ToPeer
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.secure import secure_accepted, secure_dialled
from isthmus.training.layout import header_of, pack
from isthmus.units import format_bandwidth, format_size, parse_bandwidth, parse_duration

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
MESSAGE_BYTES = (64 << 10, 1 << 20, 16 << 20)
LATENCY = "50 ms"
BANDWIDTHS = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
SMALL_BYTES = 64
LOAD_S = 0.5
"""A large message keeps its link busy for about this long."""


Kind = Literal["bare", "channel", "secure"]
KINDS: tuple[Kind, ...] = ("channel", "bare", "secure")


class Streamed(NamedTuple):
    """What goes from one process to another."""

    kind: Kind
    size_bytes: int
    messages: int


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds. CPU counts both processes."""

    message_bytes: int
    channel_bytes_per_s: float
    bare_bytes_per_s: float
    secure_bytes_per_s: float
    channel_cpu_s_per_gb: float
    bare_cpu_s_per_gb: float
    secure_cpu_s_per_gb: float
    channel_to_bare: float
    """Medians over the rounds of the ratio of two speeds, one after the other."""
    secure_to_channel: float


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """One emulated link and one size. Errors are seconds late; `cpu_share` is CPU time over busy time, both ends."""

    bandwidth: str
    latency: str
    message_bytes: int
    messages: int
    expected_s: float
    median_error_s: float
    worst_error_s: float
    cpu_share: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    load: float
    """Other work on the host: its one-minute load average at the start."""
    throughput: tuple[Throughput, ...]
    accuracy: tuple[Accuracy, ...]


def parcel(tensor: torch.Tensor) -> ToPeer:
    return ToPeer(run="r", body=Arrived(parcel="forward", source=0, item=0), tensors=(header_of("x", tensor),))


def certified(authority: Authority, folder: Path, role: Role) -> Identity:
    identity = Identity.made(folder)
    identity.keep(authority.certify(identity.request(), role)[1], authority.der())
    return identity


def opened(connection: socket.socket, kind: Kind, identities: Path, *, dials: bool) -> SocketChannel | None:
    """One end; None for a bare socket."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "bare":
        return None
    if kind == "channel":
        return SocketChannel(connection, "the other")
    if dials:
        expected = Party("coordinator", "")
        return SocketChannel(secure_dialled(connection, Identity(identities / "device"), expected), "the other")
    accepted, _ = secure_accepted(connection, Identity(identities / "coordinator"), unknown_peers=False)
    return SocketChannel(accepted, "the other")


def receive(pipe: Connection, address: tuple[str, int], what: Streamed, identities: Path) -> None:
    """The receiving process: after each burst its seconds of CPU, until None is asked for."""
    torch.set_num_threads(1)
    with socket.create_connection(address) as connection:
        channel = opened(connection, what.kind, identities, dials=True)
        buffer = memoryview(bytearray(what.size_bytes))
        while pipe.recv() is not None:
            began_cpu_s = time.process_time()
            for _ in range(what.messages):
                if channel is not None:
                    channel.receive()
                else:
                    at = 0
                    while at < what.size_bytes:
                        at += connection.recv_into(buffer[at:])
            pipe.send(time.process_time() - began_cpu_s)
        if channel is not None:
            channel.close()


class Stream:
    """A connection to another process, which stays open for all bursts."""

    def __init__(self, what: Streamed, identities: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._what = what
        self._pipe, theirs = context.Pipe()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._process = context.Process(target=receive, args=(theirs, listener.getsockname(), what, identities))
            self._process.start()
            self._connection, _ = listener.accept()
        self._tensor = torch.ones(what.size_bytes, dtype=torch.uint8)
        self._channel = opened(self._connection, what.kind, identities, dials=False)

    def burst(self) -> tuple[float, float]:
        """Bytes per second and CPU seconds per GB of one burst."""
        what, tensor = self._what, self._tensor
        self._pipe.send("go")
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for _ in range(what.messages):
            if self._channel is not None:
                self._channel.send(parcel(tensor), [pack(tensor)])
            else:
                self._connection.sendall(pack(tensor))
        cpu_s = time.process_time() - began_cpu_s
        cpu_s += self._pipe.recv()
        took_s = time.monotonic() - began_s
        total_bytes = what.size_bytes * what.messages
        return total_bytes / took_s, cpu_s / (total_bytes / 1e9)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()
        if self._channel is not None:
            self._channel.close()
        self._connection.close()


def throughput(size_bytes: int, burst_bytes: int, rounds: int) -> Throughput:
    """Short bursts in turns, in another order each round: what else the machine does falls on all kinds alike. The
    first round is to warm up."""
    runs: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority(folder / "authority")
        certified(authority, folder / "device", "device")
        certified(authority, folder / "coordinator", "coordinator")
        streams = {kind: Stream(Streamed(kind, size_bytes, burst_bytes // size_bytes), folder) for kind in KINDS}
        for number in range(rounds + 1):
            for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
                found = streams[kind].burst()
                if number:
                    runs[kind].append(found)
        for stream in streams.values():
            stream.close()
    speed = {kind: statistics.median(speed for speed, _ in found) for kind, found in runs.items()}
    cpu = {kind: statistics.median(cpu for _, cpu in found) for kind, found in runs.items()}

    def ratio(kind: Kind, other: Kind) -> float:
        return statistics.median(a[0] / b[0] for a, b in zip(runs[kind], runs[other], strict=True))

    return Throughput(
        message_bytes=size_bytes,
        channel_bytes_per_s=speed["channel"],
        bare_bytes_per_s=speed["bare"],
        secure_bytes_per_s=speed["secure"],
        channel_cpu_s_per_gb=cpu["channel"],
        bare_cpu_s_per_gb=cpu["bare"],
        secure_cpu_s_per_gb=cpu["secure"],
        channel_to_bare=ratio("channel", "bare"),
        secure_to_channel=ratio("secure", "channel"),
    )


def accuracy(bandwidth: str, size_bytes: int, messages: int) -> Accuracy:
    shape = Link(parse_duration(LATENCY, "latency"), parse_bandwidth(bandwidth, "bandwidth"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = SocketChannel(socket.create_connection(listener.getsockname()), "receiver")
        receiver = SocketChannel(listener.accept()[0], "sender")
    lane = SendLane(sender, shape=shape)
    tensor = torch.ones(size_bytes, dtype=torch.uint8)
    errors_s: list[float] = []
    busy_s = cpu_s = expected_s = 0.0
    for _ in range(messages):
        before_bytes = receiver.received_bytes
        began_cpu_s, handed_s = time.process_time(), time.monotonic()
        lane.put(parcel(tensor), [tensor])
        received = receiver.receive()
        took_s = time.monotonic() - handed_s
        del received  # giving back its memory is not part of the way
        cpu_s += time.process_time() - began_cpu_s
        expected_s = shape.transfer_s(receiver.received_bytes - before_bytes)
        busy_s += expected_s - shape.latency_s
        errors_s.append(took_s - expected_s)
    lane.close()
    sender.close()
    receiver.close()
    return Accuracy(
        bandwidth=bandwidth,
        latency=LATENCY,
        message_bytes=size_bytes,
        messages=messages,
        expected_s=expected_s,
        median_error_s=statistics.median(errors_s),
        worst_error_s=max(errors_s, key=abs),
        cpu_share=cpu_s / busy_s,
    )


def table(found: Report) -> Table:
    drawn = Table("", "message", title="Transport", caption=f"{found.host}; load {found.load:.1f} at the start")
    for heading in ("this", "against", "ratio or median error", "CPU"):
        drawn.add_column(heading, justify="right")
    for t in found.throughput:
        channel = t.channel_bytes_per_s, t.channel_cpu_s_per_gb
        bare = t.bare_bytes_per_s, t.bare_cpu_s_per_gb
        _compare(drawn, "channel against bare sockets", t, channel, bare, t.channel_to_bare)
    for t in found.throughput:
        channel = t.channel_bytes_per_s, t.channel_cpu_s_per_gb
        secure = t.secure_bytes_per_s, t.secure_cpu_s_per_gb
        _compare(drawn, "TLS channel against channel", t, secure, channel, t.secure_to_channel)
    drawn.add_section()
    for a in found.accuracy:
        large = a.message_bytes > SMALL_BYTES
        rate = format_bandwidth(parse_bandwidth(a.bandwidth, "bandwidth"))
        drawn.add_row(
            f"emulated {rate}, {a.latency}",
            format_size(a.message_bytes),
            f"{a.expected_s + a.median_error_s:.4f} s",
            f"{a.expected_s:.4f} s",
            f"{a.median_error_s * 1e3:+.2f} ms (worst {a.worst_error_s * 1e3:+.2f})",
            f"{a.cpu_share:.1%} of a core" if large else "",
        )
    return drawn


def _compare(
    drawn: Table, what: str, t: Throughput, one: tuple[float, float], other: tuple[float, float], ratio: float
) -> None:
    """Each is bytes per second and CPU seconds per GB."""
    drawn.add_row(
        what,
        format_size(t.message_bytes),
        f"{one[0] / 1e9:.2f} GB/s",
        f"{other[0] / 1e9:.2f} GB/s",
        f"{ratio:.2f}",
        f"{one[1]:.2f} against {other[1]:.2f} s/GB",
    )


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer and smaller rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rounds, burst_bytes, times = (3, 1 << 25, 1) if options.quick else (15, 1 << 26, 3)
    speeds: list[Throughput] = []
    for size_bytes in MESSAGE_BYTES:
        print(f"throughput of {format_size(size_bytes)} messages ...", file=sys.stderr)
        speeds.append(throughput(size_bytes, burst_bytes, rounds))
    errors: list[Accuracy] = []
    for bandwidth in BANDWIDTHS:
        print(f"emulated link of {bandwidth} ...", file=sys.stderr)
        errors.append(accuracy(bandwidth, SMALL_BYTES, 10 * times))
        errors.append(accuracy(bandwidth, int(parse_bandwidth(bandwidth, "bandwidth") * LOAD_S), times))
    print("emulated link of 100 Mbit/s, 20 MB ...", file=sys.stderr)
    errors.append(accuracy("100 Mbit/s", 20_000_000, times))
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        load=load,
        host=machine(),
        throughput=tuple(speeds),
        accuracy=tuple(errors),
    )
    write_figures(options.json, found)
    Console(width=130).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
