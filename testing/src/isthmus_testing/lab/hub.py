"""The hub of the lab: one process that owns every network namespace and carries every frame between them.

    device a                       the hub's own namespace                      device b
    ┌──────┐  veth   ┌───────┐    ┌─────────────────────────┐    ┌───────┐  veth   ┌──────┐
    │ eth0 ├─────────┤ port1 ├───►│ rate, queue, then delay │───►│ port2 ├─────────┤ eth0 │
    └──────┘         └───────┘    └─────────────────────────┘    └───────┘         └──────┘

Frames are read from and written to the ports with AF_PACKET sockets. Their vnet headers let a TCP burst of up
to 64 KB cross as one frame that is never cut or checksummed; this is what makes Python fast enough.
tc-netem would need a kernel module that many hosts lack; /dev/net/tun is often closed to ordinary users.

The namespaces live only as file descriptors of this process, and the ports only in its own namespace, so
nothing is visible outside and everything vanishes with the process. It ends when its standard input closes or
when its parent dies (a pidfd: PR_SET_PDEATHSIG would fire when the *thread* that started the hub ends).

Run as a script, with standard input carrying a `HubSpec` line and then one empty line per request for statistics.
It imports nothing of Isthmus, so that it starts in a tenth of a second and stays single-threaded, which
unshare(CLONE_NEWUSER) demands.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

_CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 6, 15, 23
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 64 << 20
_MAX_FRAME_BYTES = 1 << 17
_FRAMES_PER_TURN = 64

_VNET_HEADER = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
_GSO_NONE, _GSO_UDP_L4, _GSO_ECN = 0, 5, 0x80

# Room for a 64 MB window, no cached path metrics from one connection to the next, and no return to slow start
# on an idle connection: what a tuned host sets for a long fat link. Without IPv6 there is no router discovery.
_SYSCTLS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/tcp_rmem": "4096 131072 67108864",
    "ipv4/tcp_wmem": "4096 131072 67108864",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
}


class PathSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One directed path between two places, given by their index; None means without limit."""

    source: int
    target: int
    latency_s: float
    bandwidth_bytes_per_s: float | None
    queue_limit_bytes: float | None


class HubSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """IPv4 addresses of the places and the paths between every two of them."""

    parent_pid: int
    addresses: list[str]
    paths: list[PathSpec]


class HubReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The hub carries frames; place i is the namespace behind /proc/<pid>/fd/<namespaces[i]>."""

    pid: int
    namespaces: list[int]
    owns_user_namespace: bool


class HubFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The hub could not be built on this host."""

    reason: str


class PathCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one directed path so far, in frames and bytes as they would be on the wire."""

    source: int
    target: int
    packets: int
    wire_bytes: int
    drops: int


class HubCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the hub so far; `overflows` are frames lost because the host did not let it read in time."""

    paths: list[PathCount]
    overflows: int
    mean_lateness_s: float
    worst_lateness_s: float


class ShapedPath:
    """One direction of a link: a transmitter of fixed rate behind a bounded queue, then a fixed delay.

    A frame of w bytes that arrives at t leaves the transmitter at f = max(t, previous f) + w / rate and is due
    at f + latency. It is dropped when it would wait longer than the queue's bytes take to send (drop-tail).
    """

    def __init__(self, spec: PathSpec) -> None:
        rate, limit = spec.bandwidth_bytes_per_s, spec.queue_limit_bytes
        self.source, self.target = spec.source, spec.target
        self.packets = self.wire_bytes = self.drops = 0
        self._latency_s = spec.latency_s
        self._s_per_byte = 0.0 if rate is None else 1.0 / rate
        self._longest_wait_s = math.inf if rate is None or limit is None else limit / rate
        self._free_s = 0.0

    def admit(self, now_s: float, packets: int, wire_bytes: int) -> float | None:
        """Return when a frame (of `packets` segments) that arrives now is due at the target; None if it is dropped."""
        start_s = max(self._free_s, now_s)
        if start_s - now_s > self._longest_wait_s:
            self.drops += packets
            return None
        self._free_s = start_s + wire_bytes * self._s_per_byte
        self.packets += packets
        self.wire_bytes += wire_bytes
        return self._free_s + self._latency_s

    def count(self) -> PathCount:
        return PathCount(
            source=self.source,
            target=self.target,
            packets=self.packets,
            wire_bytes=self.wire_bytes,
            drops=self.drops,
        )


def wire_size(frame: bytes) -> tuple[int, int]:
    """Packets and bytes on the wire of a frame that starts with its vnet header.

    A super-packet carries its Ethernet, IP and TCP headers once, but a real link would see them in front of every
    `gso_size` bytes of payload (virtio 1.2, section 5.1.6). Preamble, checksum and gap are not counted.
    """
    _, gso_type, _, gso_size, transport_at, _ = _VNET_HEADER.unpack_from(frame)
    size = len(frame) - _VNET_HEADER.size
    kind = gso_type & ~_GSO_ECN
    if kind == _GSO_NONE:
        return 1, size
    # hdr_len is only a hint (Linux puts the length of the linear part there): read TCP's own header length.
    tcp_words = frame[_VNET_HEADER.size + transport_at + 12] >> 4
    headers = transport_at + (8 if kind == _GSO_UDP_L4 else 4 * tcp_words)
    packets = max(1, math.ceil((size - headers) / gso_size))
    return packets, size + (packets - 1) * headers


class Port:
    """The hub's end of one device's cable, with the paths that start there by destination MAC address."""

    def __init__(self, interface: str) -> None:
        self.paths: dict[bytes, ShapedPath] = {}
        self.overflows = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        except PermissionError:  # only the host's own root may exceed net.core.rmem_max
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._socket.setblocking(False)
        self._socket.bind((interface, _ETH_P_ALL))
        self.receive, self.send = self._socket.recv, self._socket.send

    def fileno(self) -> int:
        return self._socket.fileno()

    def count_overflows(self) -> int:
        # Reading the kernel's counter resets it.
        statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self.overflows += struct.unpack("=II", statistics)[1]
        return self.overflows


class Hub:
    """Reads frames from the ports, keeps them until they are due, and writes them to the port of the target."""

    def __init__(self, spec: HubSpec) -> None:
        self._ports = [Port(_port_name(index)) for index in range(len(spec.addresses))]
        self._paths = [ShapedPath(path) for path in spec.paths]
        for path in self._paths:
            self._ports[path.source].paths[mac_address(spec.addresses[path.target])] = path
        self._waiting: list[tuple[float, int, ShapedPath, bytes]] = []
        self._admitted = self._delivered = 0
        self._lateness_s = self._worst_lateness_s = 0.0

    def run(self, control: int, parent: int) -> None:
        """Carry frames until `control` reaches its end or `parent` (a pidfd) becomes readable."""
        watched = [*self._ports, control, parent]
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            # select, not epoll: its timeout has microseconds, epoll's is rounded up to milliseconds.
            for ready in select.select(watched, [], [], wait_s)[0]:
                if isinstance(ready, Port):
                    self._take_in(ready)
                elif ready == parent or not (requests := os.read(control, 4096)):
                    return
                else:
                    for _ in range(requests.count(b"\n")):
                        _send(self.count())
            self._hand_out()

    def count(self) -> HubCount:
        return HubCount(
            paths=[path.count() for path in self._paths],
            overflows=sum(port.count_overflows() for port in self._ports),
            mean_lateness_s=self._lateness_s / max(1, self._delivered),
            worst_lateness_s=self._worst_lateness_s,
        )

    def _take_in(self, port: Port) -> None:
        destination = slice(_VNET_HEADER.size, _VNET_HEADER.size + 6)
        for _ in range(_FRAMES_PER_TURN):
            try:
                frame = port.receive(_MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            path = port.paths.get(frame[destination])
            if path is None:  # broadcast or multicast: neighbours are static, nobody needs it
                continue
            due_s = path.admit(time.monotonic(), *wire_size(frame))
            if due_s is not None:
                self._admitted += 1
                heapq.heappush(self._waiting, (due_s, self._admitted, path, frame))

    def _hand_out(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            due_s, _, path, frame = heapq.heappop(self._waiting)
            self._delivered += 1
            self._lateness_s += now_s - due_s
            self._worst_lateness_s = max(self._worst_lateness_s, now_s - due_s)
            try:
                self._ports[path.target].send(frame)
            except OSError:  # a full queue, or a frame that the kernel refuses: on a real link it is lost too
                path.drops += wire_size(frame)[0]


def mac_address(address: str) -> bytes:
    """The locally administered MAC address of the place with this IPv4 address."""
    return b"\x02\x00" + socket.inet_aton(address)


def _port_name(index: int) -> str:
    return f"port{index + 1}"


def system_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare and os.setns arrive in Python 3.12
    if libc[name](*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _enter_user_namespace() -> bool:
    """Become root of a new user namespace unless this process may make network namespaces already."""
    try:
        system_call("unshare", CLONE_NEWNET)
        return False
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
    try:
        system_call("unshare", _CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise OSError(f"it needs CAP_SYS_ADMIN or a user namespace, and got neither ({error})") from error
    return True


def _new_namespace() -> int:
    """Move this process into a new network namespace and return a descriptor that keeps it alive."""
    system_call("unshare", CLONE_NEWNET)
    for name, value in _SYSCTLS.items():
        with suppress(FileNotFoundError):  # a kernel built without IPv6
            Path("/proc/sys/net", name).write_text(value)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _ip(commands: list[str]) -> None:
    program = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise OSError("the program 'ip' (iproute2) is not installed")
    done = subprocess.run([program, "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip: {' '.join(done.stderr.split())}")


def _connect(addresses: list[str]) -> list[int]:
    """Make one namespace per address, each with a cable to a port in a further one, where this process stays."""
    macs = [mac_address(address).hex(":") for address in addresses]
    namespaces = [_new_namespace() for _ in addresses]
    here = _new_namespace()
    for index, namespace in enumerate(namespaces):
        peer = f"peer name eth0 address {macs[index]} netns /proc/{os.getpid()}/fd/{namespace}"
        port = _port_name(index)
        _ip([f"link add {port} type veth {peer}", f"link set {port} up"])
    for index, namespace in enumerate(namespaces):
        system_call("setns", namespace, CLONE_NEWNET)
        # No default route: a packet for any other address has nowhere to go.
        commands = ["link set lo up", f"address add {addresses[index]}/24 dev eth0", "link set eth0 up"]
        commands += [
            f"neighbour add {address} lladdr {mac} dev eth0 nud permanent"
            for other, (address, mac) in enumerate(zip(addresses, macs, strict=True))
            if other != index
        ]
        _ip(commands)
    system_call("setns", here, CLONE_NEWNET)
    return namespaces


def _send(message: HubReady | HubFailed | HubCount) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    control = sys.stdin.fileno()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=HubSpec)
    try:
        parent = os.pidfd_open(spec.parent_pid)
        if os.getppid() != spec.parent_pid:
            return  # the parent died before it could be watched
        owns_user_namespace = _enter_user_namespace()
        namespaces = _connect(spec.addresses)
        hub = Hub(spec)
    except OSError as error:
        _send(HubFailed(reason=str(error)))
        return
    with suppress(PermissionError):  # a hub that is scheduled late adds its lateness to every link
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    _send(HubReady(pid=os.getpid(), namespaces=namespaces, owns_user_namespace=owns_user_namespace))
    hub.run(control, parent)


if __name__ == "__main__":
    main()
