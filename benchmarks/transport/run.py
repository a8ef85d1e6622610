"""The transport: what a framed channel costs over bare sockets, and how exact an emulated link is.

`python benchmarks/transport/run.py [--quick] [--json PATH]`

Throughput is between two processes over loopback TCP. A bare pair does `sendall` from one buffer and `recv_into`
another; a channel sends frames from a tensor and receives each into a fresh one. Runs alternate, medians are shown.
An emulated link carries messages one at a time; its error is the time a message took less size / bandwidth + latency.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from isthmus.fleet import Link
from isthmus.runtime.channel import SocketChannel
from isthmus.runtime.lanes import SendLane
from isthmus.runtime.messages import ParcelMessage
from isthmus.training.layout import header_of, pack
from isthmus.units import format_bandwidth, format_size, parse_bandwidth, parse_duration

LATEST = Path(__file__).parent / "results" / "latest.json"
MESSAGE_BYTES = (64 << 10, 1 << 20, 16 << 20)
LATENCY = "50 ms"
BANDWIDTHS = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
SMALL_BYTES = 64
LOAD_S = 0.5
"""A large message keeps its link busy for about this long."""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds. CPU counts both processes."""

    message_bytes: int
    channel_bytes_per_s: float
    bare_bytes_per_s: float
    channel_cpu_s_per_gb: float
    bare_cpu_s_per_gb: float

    @property
    def ratio(self) -> float:
        return self.channel_bytes_per_s / self.bare_bytes_per_s


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


def parcel(tensor: torch.Tensor) -> ParcelMessage:
    return ParcelMessage(run="r", parcel="forward", source=0, item=0, tensors=(header_of("x", tensor),))


def receive(pipe: Connection, address: tuple[str, int], framed: bool, size_bytes: int, count: int) -> None:
    """The receiving process: `count` messages, then its seconds of CPU."""
    torch.set_num_threads(1)
    with socket.create_connection(address) as connection:
        channel = SocketChannel(connection, "sender") if framed else None
        buffer = memoryview(bytearray(size_bytes))
        began_cpu_s = time.process_time()
        for _ in range(count):
            if channel is not None:
                channel.receive()
            else:
                at = 0
                while at < size_bytes:
                    at += connection.recv_into(buffer[at:])
        pipe.send(time.process_time() - began_cpu_s)
        if channel is not None:
            channel.close()


def stream(framed: bool, size_bytes: int, count: int) -> tuple[float, float]:
    """Bytes per second and CPU seconds per GB of `count` messages to another process."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(
            target=receive, args=(theirs, listener.getsockname(), framed, size_bytes, count)
        )
        process.start()
        connection, _ = listener.accept()
    tensor = torch.ones(size_bytes, dtype=torch.uint8)
    channel = SocketChannel(connection, "receiver") if framed else None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for _ in range(count):
        if channel is not None:
            channel.send(parcel(tensor), [pack(tensor)])
        else:
            connection.sendall(pack(tensor))
    cpu_s = time.process_time() - began_cpu_s + ours.recv()
    took_s = time.monotonic() - began_s
    process.join()
    if channel is not None:
        channel.close()
    connection.close()
    total_bytes = size_bytes * count
    return total_bytes / took_s, cpu_s / (total_bytes / 1e9)


def throughput(size_bytes: int, total_bytes: int, rounds: int) -> Throughput:
    runs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(rounds):
        for framed in runs:
            runs[framed].append(stream(framed, size_bytes, total_bytes // size_bytes))
    (channel_speed, channel_cpu), (bare_speed, bare_cpu) = (
        (statistics.median(speed for speed, _ in runs[f]), statistics.median(cpu for _, cpu in runs[f]))
        for f in (True, False)
    )
    return Throughput(
        message_bytes=size_bytes, channel_bytes_per_s=channel_speed, bare_bytes_per_s=bare_speed,
        channel_cpu_s_per_gb=channel_cpu, bare_cpu_s_per_gb=bare_cpu,
    )  # fmt: skip


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
        before_bytes = receiver.statistics().received_bytes
        began_cpu_s, handed_s = time.process_time(), time.monotonic()
        lane.put(parcel(tensor), [tensor])
        received = receiver.receive()
        took_s = time.monotonic() - handed_s
        del received  # giving back its memory is not part of the way
        cpu_s += time.process_time() - began_cpu_s
        expected_s = shape.transfer_s(receiver.statistics().received_bytes - before_bytes)
        busy_s += expected_s - shape.latency_s
        errors_s.append(took_s - expected_s)
    lane.close()
    sender.close()
    receiver.close()
    return Accuracy(
        bandwidth=bandwidth, latency=LATENCY, message_bytes=size_bytes, messages=messages, expected_s=expected_s,
        median_error_s=statistics.median(errors_s), worst_error_s=max(errors_s, key=abs), cpu_share=cpu_s / busy_s,
    )  # fmt: skip


def table(found: Report) -> Table:
    drawn = Table("", "message", title="Transport", caption=f"{found.host}; load {found.load:.1f} at the start")
    for heading in ("this", "against", "ratio or median error", "CPU"):
        drawn.add_column(heading, justify="right")
    for t in found.throughput:
        drawn.add_row(
            "channel against bare sockets", format_size(t.message_bytes), f"{t.channel_bytes_per_s / 1e9:.2f} GB/s",
            f"{t.bare_bytes_per_s / 1e9:.2f} GB/s", f"{t.ratio:.2f}",
            f"{t.channel_cpu_s_per_gb:.2f} against {t.bare_cpu_s_per_gb:.2f} s/GB",
        )  # fmt: skip
    drawn.add_section()
    for a in found.accuracy:
        large = a.message_bytes > SMALL_BYTES
        rate = format_bandwidth(parse_bandwidth(a.bandwidth, "bandwidth"))
        drawn.add_row(
            f"emulated {rate}, {a.latency}", format_size(a.message_bytes),
            f"{a.expected_s + a.median_error_s:.4f} s", f"{a.expected_s:.4f} s",
            f"{a.median_error_s * 1e3:+.2f} ms (worst {a.worst_error_s * 1e3:+.2f})",
            f"{a.cpu_share:.1%} of a core" if large else "",
        )  # fmt: skip
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    parser.add_argument("--json", type=Path, default=LATEST, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rounds, total_bytes, times = (1, 1 << 28, 1) if options.quick else (5, 1 << 30, 3)
    speeds: list[Throughput] = []
    for size_bytes in MESSAGE_BYTES:
        print(f"throughput of {format_size(size_bytes)} messages ...", file=sys.stderr)
        speeds.append(throughput(size_bytes, total_bytes, rounds))
    errors: list[Accuracy] = []
    for bandwidth in BANDWIDTHS:
        print(f"emulated link of {bandwidth} ...", file=sys.stderr)
        errors.append(accuracy(bandwidth, SMALL_BYTES, 10 * times))
        errors.append(accuracy(bandwidth, int(parse_bandwidth(bandwidth, "bandwidth") * LOAD_S), times))
    print("emulated link of 100 Mbit/s, 20 MB ...", file=sys.stderr)
    errors.append(accuracy("100 Mbit/s", 20_000_000, times))
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"), load=load,
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        throughput=tuple(speeds), accuracy=tuple(errors),
    )  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    Console(width=130).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
