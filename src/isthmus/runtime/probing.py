"""A device's part in a probe: times messages to another device, and its own computing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from isthmus.errors import PeerError, UserError
from isthmus.runtime.channel import SocketChannel
from isthmus.runtime.identity import Party
from isthmus.runtime.launcher import Place
from isthmus.runtime.listener import Listener
from isthmus.runtime.messages import AnyMessage
from isthmus.runtime.probe_messages import Computes, Expect, Expecting, Load, Measure, Measured
from isthmus.runtime.reaching import Parking, Reacher, Route
from isthmus.training.layout import header_of, pack

SIZES_BYTES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
REPEATS = 5
WARM_BYTES = 1 << 20
"""Sent first: a connection's first megabyte takes two to three times as long."""
ENOUGH_S = 3.0
"""Of one link. A size that takes longer than a third of it is the last."""
COMPUTE_LIMIT_S = 120.0


def expect_probe(asked: Expect, reacher: Reacher, place: Place) -> Expecting:
    """Listen for the one device that will measure the link to us; returns where."""
    patience_s = reacher.patience_s
    try:
        listener = Listener(place.host, place.port, identity=reacher.identity, patience_s=patience_s)
    except UserError as e:
        return Expecting(run=asked.run, failure=str(e)[:500])

    def answer(channel: SocketChannel) -> None:
        if channel.party != Party("device", asked.id):
            channel.close()
            return
        close()
        try:
            while channel.receive(_only_load, idle_s=patience_s) is not None:
                channel.send(Load(run=asked.run))
        except PeerError:
            pass  # the other one tells how it went
        finally:
            channel.close()

    def close() -> None:
        listener.close()
        parking.close()

    parking = Parking(reacher, asked.run, lambda found: listener.adopt(found, "relayed", answer))
    listener.start(answer)
    timer = threading.Timer(patience_s, close)
    timer.daemon = True
    timer.start()
    port = 0 if place.relayed else listener.port
    return Expecting(run=asked.run, host=place.address or place.host, port=port)


def _only_load(message: AnyMessage) -> None:
    if not isinstance(message, Load) or sum(t.nbytes for t in message.tensors) > SIZES_BYTES[-1]:
        raise PeerError(f"sent {type(message).__name__}, which is no load of a probe")


def measure_link(asked: Measure, reacher: Reacher) -> Measured:
    """Time messages of several sizes to another device and back, on a connection like those of a run."""
    times: list[tuple[int, float]] = []
    patience_s = reacher.patience_s
    try:
        channel, relayed = reacher.reach(
            Route(run=asked.run, other="the other device", host=asked.host, port=asked.port, id=asked.id)
        )
        try:
            _round_trip(channel, asked.run, WARM_BYTES, patience_s)
            for size_bytes in SIZES_BYTES:
                taken = [_round_trip(channel, asked.run, size_bytes, patience_s) for _ in range(REPEATS)]
                times += [(size_bytes, seconds) for seconds in taken]
                if sum(taken) > ENOUGH_S / 3:
                    break
        finally:
            channel.close()
    except PeerError as e:
        return Measured(run=asked.run, failure=str(e)[:500])
    return Measured(run=asked.run, times=tuple(times), relayed=relayed)


def _round_trip(channel: SocketChannel, probe: str, size_bytes: int, patience_s: float) -> float:
    load = torch.zeros(size_bytes, dtype=torch.uint8)
    began_s = time.monotonic()
    channel.send(Load(run=probe, tensors=(header_of("load", load),)), [pack(load)])
    if channel.receive(_only_load, idle_s=patience_s) is None:
        raise PeerError(f"{channel.other}: closed the connection")
    return time.monotonic() - began_s


def compute_speed(probe: str, threads: int, place: Place) -> Computes:
    """Of all ranks together: those of this machine at the same time, other machines as this one. Each of them holds
    the stage's weights, so a machine's memory counts as shared by its ranks."""
    try:
        with ThreadPoolExecutor(place.local_ranks) as pool:
            found = list(pool.map(_speed, [threads] * place.local_ranks))
    except (subprocess.SubprocessError, OSError, ValueError, KeyError) as e:
        return Computes(run=probe, failure=f"{type(e).__name__}: {e}"[:500])
    machines = place.ranks / place.local_ranks
    return Computes(
        run=probe, flops_per_s=machines * sum(speed for speed, _ in found),
        memory_bytes=min(memory for _, memory in found) // place.local_ranks,
    )  # fmt: skip


def _speed(threads: int) -> tuple[float, int]:
    """FLOP/s and memory, in a process of its own, so that the agent stays small."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "isthmus.runtime.speed", str(threads)], capture_output=True, text=True,
        timeout=COMPUTE_LIMIT_S, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    return float(found["flops_per_s"]), int(found["memory_bytes"])
