"""A WAN on one machine: real TCP between network namespaces, with the delay and rate of a fleet's links.

    with Lab(fleet) as lab:
        subprocess.run([*lab.command("oslo"), "ping", lab.addresses["tokyo"]])

Every device of the fleet is a place with a namespace and an address of its own, and so is the coordinator. From a
place only the other places can be reached, and nothing of the lab can be seen from outside (see `hub`).
It works as root, and as an ordinary user where the kernel allows user namespaces.

A link's bandwidth is what the wire carries: Ethernet, IP and TCP headers count, as on a rented circuit. TCP's
payload gets 1448 of every 1514 bytes (`payload_bandwidth_bytes_per_s`). Each direction has a drop-tail queue of two
bandwidth-delay products and a megabyte, so a loss-based sender keeps the wire full and a paced one loses nothing.
The segments that TCP hands to its interface as one burst travel together and arrive when the last of them would.

`python -m isthmus_testing.lab` compares what was asked for with what is measured.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from itertools import permutations
from pathlib import Path
from types import TracebackType

import msgspec

from isthmus.errors import InternalError, IsthmusError, UserError, unknown_name
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus_testing.lab import hub as hub_program
from isthmus_testing.lab import probe as probe_program
from isthmus_testing.lab.hub import HubCount, HubFailed, HubReady, HubSpec, PathSpec

COORDINATOR = "coordinator"

_NETWORK = "10.99.0"
_MOST_PLACES = 254
_SPARE_QUEUE_BYTES = 1_000_000
_PAYLOAD_SHARE = 1448 / 1514  # of a full frame: 14 bytes Ethernet, 20 IPv4, 20 TCP and 12 for its timestamps
_HUB_DIED = "the hub of the network lab has died: see its message on standard error"
_START_TIMEOUT_S = 60.0
_REPLY_TIMEOUT_S = 10.0


class PairStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one direction, as it would be on the wire, and of the packets that it dropped."""

    packets: int
    wire_bytes: int
    drops: int


class LabStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of every ordered pair of places, and how well this machine kept up with it.

    `overflows` packets were lost before the hub could read them, and packets were handed over `mean_lateness_s`
    after they were due: if either is not small, the machine is too busy for the rates that were asked for.
    """

    pairs: dict[tuple[str, str], PairStatistics]
    overflows: int
    mean_lateness_s: float
    worst_lateness_s: float


class Lab:
    """Network namespaces for a fleet's devices and its coordinator, joined by shaped links, while in the context.

    Links with the coordinator carry only control traffic: they have no delay and no limit unless `coordinator_link`
    gives one for both directions. Nothing gets from one to the other of two places that are `apart`.
    Programs that still run in a place when the lab closes lose their network.
    Raises `UserError` if the fleet does not fit, and on entry if this machine cannot have a lab.
    """

    def __init__(
        self, fleet: Fleet, *, coordinator_link: Link | None = None, apart: Collection[tuple[str, str]] = ()
    ) -> None:
        if COORDINATOR in fleet.names:
            raise UserError(f"fleet {fleet.name!r}: got a device named {COORDINATOR!r}, expected another name in a lab")
        self._places = (*fleet.names, COORDINATOR)
        if len(self._places) > _MOST_PLACES:
            raise UserError(
                f"fleet {fleet.name!r}: got {len(fleet.names)} devices, expected at most {_MOST_PLACES - 1} in a lab"
            )
        self.addresses = {place: f"{_NETWORK}.{number}" for number, place in enumerate(self._places, 1)}
        """The IPv4 address of every place."""
        self._links = {
            (source, target): coordinator_link if COORDINATOR in (source, target) else fleet.link(source, target)
            for source, target in permutations(self._places, 2)
        }
        self._apart = {frozenset(pair) for pair in apart}
        self._hub: _HubProcess | None = None

    def __enter__(self) -> Lab:
        if self._hub is not None:
            raise InternalError("the lab is running already: make a second one")
        self._hub = _HubProcess(self._spec())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hub, self._hub = self._running(), None
        hub.close()

    def command(self, place: str) -> list[str]:
        """The words to put before a program and its arguments so that it runs in this place's network."""
        if place not in self.addresses:
            raise unknown_name("place", place, self.addresses)
        return self._running().enter(self._places.index(place))

    def network(self, place: str) -> str:
        """The file of this place's network namespace."""
        return self._running().network(self._places.index(place))

    def payload_bandwidth_bytes_per_s(self, source: str, target: str) -> float:
        """Return the most bytes/s of the application that TCP can carry on a link; infinite where nothing limits it."""
        link = self._links[source, target]
        return float("inf") if link is None else link.bandwidth_bytes_per_s * _PAYLOAD_SHARE

    def statistics(self) -> LabStatistics:
        """Everything that was carried since the lab was entered."""
        count = self._running().count()
        return LabStatistics(
            pairs={
                (self._places[path.source], self._places[path.target]): PairStatistics(
                    packets=path.packets, wire_bytes=path.wire_bytes, drops=path.drops
                )
                for path in count.paths
            },
            overflows=count.overflows,
            mean_lateness_s=count.mean_lateness_s,
            worst_lateness_s=count.worst_lateness_s,
        )

    def _running(self) -> _HubProcess:
        if self._hub is None:
            raise InternalError("the lab is not running: use it as a context manager")
        return self._hub

    def _spec(self) -> HubSpec:
        pairs = permutations(enumerate(self._places), 2)
        return HubSpec(
            parent_pid=os.getpid(),
            addresses=list(self.addresses.values()),
            paths=[
                self._path(i, j, source, target)
                for (i, source), (j, target) in pairs
                if frozenset((source, target)) not in self._apart
            ],
        )

    def _path(self, i: int, j: int, source: str, target: str) -> PathSpec:
        there, back = self._links[source, target], self._links[target, source]
        if there is None or back is None:
            return PathSpec(source=i, target=j, latency_s=0.0, bandwidth_bytes_per_s=None, queue_limit_bytes=None)
        round_trip_bytes = there.bandwidth_bytes_per_s * (there.latency_s + back.latency_s)
        return PathSpec(
            source=i,
            target=j,
            latency_s=there.latency_s,
            bandwidth_bytes_per_s=there.bandwidth_bytes_per_s,
            queue_limit_bytes=2 * round_trip_bytes + _SPARE_QUEUE_BYTES,
        )


class _HubProcess:
    """The running hub, seen from the process that started it."""

    def __init__(self, spec: HubSpec) -> None:
        nsenter = shutil.which("nsenter")
        if nsenter is None:
            raise UserError("a network lab needs the program 'nsenter' (util-linux), which is not installed")
        self._nsenter = nsenter
        self._lock = threading.Lock()
        # A session of its own: Ctrl-C is for this process, which then closes the hub.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(hub_program.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._ask(msgspec.json.encode(spec))
            answer = msgspec.json.decode(self._answer(_START_TIMEOUT_S), type=HubReady | HubFailed)
            if isinstance(answer, HubFailed):
                raise UserError(f"this machine cannot have a network lab: {answer.reason}")
        except BaseException:
            self.close()
            raise
        self._ready = answer

    def enter(self, index: int) -> list[str]:
        words = [self._nsenter, f"--net={self.network(index)}"]
        if self._ready.owns_user_namespace:
            words += [f"--user=/proc/{self._ready.pid}/ns/user", "--preserve-credentials"]
        return [*words, "--"]

    def network(self, index: int) -> str:
        return f"/proc/{self._ready.pid}/fd/{self._ready.namespaces[index]}"

    def count(self) -> HubCount:
        with self._lock:
            self._ask(b"")
            return msgspec.json.decode(self._answer(_REPLY_TIMEOUT_S), type=HubCount)

    def close(self) -> None:
        """End the hub, and with it every namespace and cable. May be called again."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that never reached a dead hub is still in the buffer
                pipe.close()
        try:
            self._process.wait(_REPLY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise InternalError(_HUB_DIED) from None

    def _answer(self, timeout_s: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        # The hub speaks only when asked, so nothing of a further answer hides in the pipe's buffer.
        if not select.select([pipe], [], [], timeout_s)[0]:
            raise InternalError(f"the hub of the network lab has not answered for {timeout_s:.0f} s")
        line = pipe.readline()
        if not line:
            raise InternalError(_HUB_DIED)
        return line


@cache
def lab_unavailable() -> str | None:
    """Return why no lab can run on this machine, or None if it can. Tries it, in a quarter of a second, once."""
    try:
        with Lab(example_fleet()) as lab:
            done = subprocess.run([*lab.command(COORDINATOR), "true"], capture_output=True, text=True, timeout=10)
    except IsthmusError as error:
        return str(error)
    return None if done.returncode == 0 else f"a lab's namespace cannot be entered: {' '.join(done.stderr.split())}"


class LinkMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One way's median delay for small messages, and the median rate at which a warm TCP flow's payload arrives."""

    delay_s: float
    payload_bytes_per_s: float


def measure(lab: Lab, source: str, target: str, duration_s: float) -> LinkMeasurement:
    """Send from one place to another for about `duration_s` (from 1 s), with nothing else on the way, and measure."""
    if duration_s < 1:
        raise UserError(f"duration of a measurement: got {duration_s} s, expected at least 1 s")
    program = [sys.executable, "-P", str(Path(probe_program.__file__))]
    address = lab.addresses[target]
    receive = subprocess.Popen([*lab.command(target), *program, "receive", address], stdout=subprocess.PIPE, text=True)
    try:
        assert receive.stdout is not None
        port = receive.stdout.readline().strip()
        arguments = ["send", address, port, str(duration_s)]
        timeout_s = 4 * duration_s + 30
        subprocess.run([*lab.command(source), *program, *arguments], check=True, timeout=timeout_s)
        return msgspec.json.decode(receive.communicate(timeout=timeout_s)[0], type=LinkMeasurement)
    finally:
        receive.kill()
        receive.wait()


def example_fleet() -> Fleet:
    """Three devices whose six directions are all different."""
    mbit = 1e6 / 8
    routes = (
        Route("oslo", "paris", Link(0.010, 200 * mbit)),
        Route("paris", "oslo", Link(0.010, 100 * mbit)),
        Route("oslo", "tokyo", Link(0.100, 50 * mbit)),
        Route("tokyo", "oslo", Link(0.090, 20 * mbit)),
        Route("paris", "tokyo", Link(0.080, 100 * mbit)),
        Route("tokyo", "paris", Link(0.080, 40 * mbit)),
    )
    devices = tuple(
        Device(name=name, region=region, flops_per_s=1e12, memory_bytes=1 << 33)
        for name, region in (("oslo", "europe"), ("paris", "europe"), ("tokyo", "asia"))
    )
    return Fleet(name="lab-example", devices=devices, links=Links(devices=routes))
