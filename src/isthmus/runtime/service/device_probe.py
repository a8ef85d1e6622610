"""A device's part in a probe: times messages to another device, and its own computing; and `isthmus probe` of one
machine, with the loopback interface between its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.fleet.fleet import fit_link
from isthmus.runtime.identity import Party
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE
from isthmus.runtime.messages.probe import (
    SIZES_BYTES,
    ExpectDial,
    ExpectingDial,
    LinkTimes,
    LoadMessage,
    MeasuredSpeed,
    MeasureLink,
    MeasureSpeed,
)
from isthmus.runtime.messages.run import StreamHello
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.fleet_probe import NO_JOB, combined_speed, measured_device, measured_link
from isthmus.runtime.service.speed import TimedWork as Speed
from isthmus.runtime.service.speed import share_of
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.multi_stream import StreamAssembler, may_gain
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute, RelayStandby
from isthmus.training.layout import header_of, pack
from isthmus.wire_types import MOST_STREAMS

REPEATS = 5
WARM_BYTES = 1 << 20  # sent first: a connection's first megabyte takes two to three times as long
GAIN = 1.1  # twice the streams must be so much faster, or they are not used
ENOUGH_S = 3.0
"""Seconds for one link. A size that takes a third of it longer than the smallest one is the last: all wait for the
latency."""
COMPUTE_LIMIT_S = 120.0


def expect_probe(
    asked: ExpectDial, dialer: PeerDialer, place: ProcessPlace
) -> tuple[ExpectingDial, Callable[[], None]]:
    """Listen for the one device that will measure the link to us; returns where, and what ends that. It ends by itself
    after the timeout."""
    timeout_s = dialer.timeout_s
    try:
        listener = Listener(place.host, place.port, identity=dialer.identity, timeout_s=timeout_s)
    except UserError as e:
        return ExpectingDial(run=asked.run, failure=str(e)[:500]), lambda: None
    assembler = StreamAssembler(timeout_s)

    def answer(channel: SocketChannel) -> None:
        if channel.party != Party("device", asked.id):
            channel.close()
            return
        try:
            answer_loads(channel, asked.run, assembler, timeout_s)
        except PeerError:
            channel.close()  # the other one tells how it went

    def close() -> None:
        listener.close()
        standby.close()

    standby = RelayStandby(dialer, asked.run, lambda found: listener.adopt(found, "relayed", answer))
    listener.start(answer)
    timer = threading.Timer(timeout_s, close)
    timer.daemon = True
    timer.start()
    port = 0 if place.relayed else listener.port
    return ExpectingDial(run=asked.run, host=place.address or place.host, port=port), close


def answer_loads(channel: SocketChannel, probe: str, assembler: StreamAssembler, timeout_s: float) -> None:
    """Nothing to every load, until the other side closes."""
    while (received := channel.receive(_only_load, idle_s=timeout_s)) is not None:
        if not isinstance(received[0], StreamHello):
            channel.send(LoadMessage(run=probe))
        elif (stream_group := assembler.add(channel, received[0])) is None:
            return  # the thread of the last stream goes on with all of them
        else:
            channel = stream_group
    channel.close()


def _only_load(message: AnyMessage) -> None:
    if not isinstance(message, LoadMessage | StreamHello) or sum(t.nbytes for t in message.tensors) > SIZES_BYTES[-1]:
        raise PeerError(f"sent {type(message).__name__}, expected a message of a probe")


def measure_link(asked: MeasureLink, dialer: PeerDialer) -> LinkTimes:
    """Time messages of several sizes to another device and back, on a connection like those of a run: of as many
    streams as make it faster."""
    route = PeerRoute(run=asked.run, other="the other device", host=asked.host, port=asked.port, id=asked.id)
    try:
        times, relayed = time_loads(route, dialer)
        link = fit_link(times)
        while may_gain(link) and route.streams < MOST_STREAMS:
            route = msgspec.structs.replace(route, streams=2 * route.streams)
            more, relayed = time_loads(route, dialer)
            found = fit_link(more)
            if found.bandwidth_bytes_per_s < GAIN * link.bandwidth_bytes_per_s:
                break
            times, link = more, found
    except (PeerError, UserError) as e:
        return LinkTimes(run=asked.run, failure=str(e)[:500])
    return LinkTimes(run=asked.run, times=tuple(times), relayed=relayed)


def time_loads(route: PeerRoute, dialer: PeerDialer) -> tuple[list[tuple[int, float]], bool]:
    """Sizes and round trips, and whether the way was by the coordinator. PeerError."""
    times: list[tuple[int, float]] = []
    channel, relayed = dialer.dial(route)
    try:
        _round_trip(channel, route.run, WARM_BYTES, dialer.timeout_s)
        for size_bytes in SIZES_BYTES:
            taken = [_round_trip(channel, route.run, size_bytes, dialer.timeout_s) for _ in range(REPEATS)]
            times += [(size_bytes, seconds) for seconds in taken]
            if sum(taken) - sum(seconds for _, seconds in times[:REPEATS]) > ENOUGH_S / 3:
                break
    finally:
        channel.close()
    return times, relayed


def _round_trip(channel: SocketChannel, probe: str, size_bytes: int, timeout_s: float) -> float:
    load = torch.zeros(size_bytes, dtype=torch.uint8)
    began_s = time.monotonic()
    channel.send(LoadMessage(run=probe, tensors=(header_of("load", load),)), [pack(load)])
    if channel.receive(_only_load, idle_s=timeout_s) is None:
        raise PeerError(f"{channel.other}: closed the connection")
    return time.monotonic() - began_s


def compute_speed(asked: MeasureSpeed, place: ProcessPlace) -> MeasuredSpeed:
    """Measure the speed of all ranks together: those of this machine at the same time; other machines count as this
    one. A CPU's memory is shared by its ranks. Each of them holds the stage's weights, so the bytes that one has count;
    or its part of everything, if they are sharded, and then the bytes that all have count."""
    probe, trial = asked.run, asked.trial
    of_rank = asked if trial is None else msgspec.structs.replace(asked, trial=share_of(trial, place.ranks))
    try:
        with ThreadPoolExecutor(place.local_ranks) as pool:
            found = list(pool.map(lambda name: _speed(of_rank, name, place), _of_ranks(place)))
    except subprocess.CalledProcessError as e:
        last = str(e.stderr).strip().rpartition("\n")[2]
        return MeasuredSpeed(run=probe, failure=f"{place.accelerator}: {last}"[:500])
    except (subprocess.SubprocessError, OSError, ValueError) as e:
        return MeasuredSpeed(run=probe, failure=f"{type(e).__name__}: {e}"[:500])
    machines, memory_bytes = place.ranks / place.local_ranks, min(one.memory_bytes for one in found)
    own_bytes = min(memory_bytes, place.memory_bytes or memory_bytes)
    if place.accelerator == "cpu":
        own_bytes //= place.local_ranks
    return MeasuredSpeed(
        run=probe,
        figures=combined_speed([one.figures for one in found], machines),
        shorter=next((one.shorter for one in found if one.shorter), ""),
        peak_flops_per_s=machines * sum(one.peak_flops_per_s for one in found),
        host_bytes_per_s=min(one.host_bytes_per_s for one in found),
        hardware=place.hardware[:MOST_HARDWARE],
        engine=place.engine,
        memory_bytes=own_bytes * (place.ranks if place.sharded else 1),
    )


def _of_ranks(place: ProcessPlace) -> list[str]:
    """Where each rank on this machine computes: the accelerators from the first rank's on, or all on the CPU."""
    kind, _, first = place.accelerator.partition(":")
    if not first:
        return [kind] * place.local_ranks
    return [f"{kind}:{int(first) + rank}" for rank in range(place.local_ranks)]


def _speed(asked: MeasureSpeed, accelerator: str, place: ProcessPlace) -> Speed:
    """In a process of its own, so that the agent stays small, and what a graph does there ends with it."""
    offered = [] if place.memory_bytes is None else [str(place.memory_bytes // place.local_ranks)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "isthmus.runtime.service.speed", accelerator, place.engine, *offered],
        capture_output=True,
        text=True,
        timeout=COMPUTE_LIMIT_S,
        check=True,
        input=msgspec.json.encode(asked).decode(),
        env={**os.environ, "OMP_NUM_THREADS": str(asked.threads)},
    )
    return msgspec.json.decode(done.stdout, type=Speed)


LOOPBACK = "127.0.0.1"
TIMEOUT_S = 60.0


def probe_machine(
    machine: str,
    places: Mapping[str, ProcessPlace],
    log: Callable[[str], None],
    asked: MeasureSpeed = NO_JOB,
    description: str = "",
) -> Fleet:
    """The devices by name, one after another, as `probe_fleet` measures those of other machines. PeerError names one
    that cannot be measured."""
    devices: list[Device] = []
    for name, place in places.items():
        log(f"measuring {name} ...")
        devices.append(measured_device(name, machine, compute_speed(asked, place), asked, log))
    return Fleet(name="probed", description=description, devices=tuple(devices), links=Links(default=_loopback()))


def _loopback() -> Link:
    listener = Listener(LOOPBACK, timeout_s=TIMEOUT_S)
    assembler = StreamAssembler(TIMEOUT_S)
    listener.start(lambda channel: answer_loads(channel, "", assembler, TIMEOUT_S))
    try:
        here = LOOPBACK, listener.port
        dialer = PeerDialer(coordinator=here, identity=None, timeout_s=TIMEOUT_S)
        times, _ = time_loads(PeerRoute(run="", other="this machine", host=here[0], port=here[1], id=""), dialer)
    finally:
        listener.close()
    return measured_link(fit_link(times))
