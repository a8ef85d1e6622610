"""A probe: the coordinator's part, what it asks of whom, and the fleet that follows; and a device's part, which times
messages to another device, and its own computing. `isthmus probe` of one machine has the loopback interface between its
processes.

The questions of a probe for a job: its model's operators, and its model's first layers as stages.

Sky Computing (sec. IV-B) times "the first few layers of the training model". More layers are nearer to the whole, and
take longer, and more memory: stages of about 1/128, 1/64, ..., 1/2 and all of the model's FLOPs are sent, and each
device measures them one after another as far as they fit and are quick.
"""

from __future__ import annotations

import bisect
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol, TypeVar

import msgspec
import torch

from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import bytes_of
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Measurement, Route
from isthmus.fleet.fleet import fit_link
from isthmus.graph import Affine, Flow, Op, OpGraph, assign, cuts, partition
from isthmus.job import Prepared
from isthmus.job.settings import Precision
from isthmus.runtime.identity import Party
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.probe import (
    MOST_LAYERS,
    MOST_OPERATORS,
    SIZES_BYTES,
    AttentionShape,
    ExpectDial,
    ExpectingDial,
    LayerStage,
    LayerTrial,
    LinkTimes,
    LoadMessage,
    MatrixProduct,
    MeasuredSpeed,
    MeasureLink,
    MeasureSpeed,
    SpeedSample,
    SyntheticColumn,
)
from isthmus.runtime.messages.run import StreamHello
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.speed import TimedWork, extent, share_of
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.multi_stream import StreamAssembler, may_gain
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute, RelayStandby
from isthmus.sanitize import sanitize
from isthmus.training.layout import header_of, pack
from isthmus.units import significant
from isthmus.wire_types import MOST_STREAMS

SHARES = tuple(2.0**-k for k in reversed(range(MOST_LAYERS)))


def speed_question(prepared: Prepared) -> MeasureSpeed:
    """The same for each device. The caller sets the probe's name."""
    job = prepared.job
    return MeasureSpeed(
        run="",
        operators=operators_of(prepared.captured.train, job.micro_batch_size),
        trial=_trial(prepared),
        threads=job.runtime.threads,
    )


def _trial(prepared: Prepared) -> LayerTrial | None:
    """None for a model whose operators count no FLOPs."""
    job, problem = prepared.job, prepared.alone()
    layers = tuple(_layers(problem, position) for position in _ends(problem))
    if not layers:
        return None
    limits = {name: column.limit for name, column in prepared.samples.columns.items()}
    graph = problem.flow.graph
    return LayerTrial(
        layers=layers,
        operators=len(problem.flow.operators),
        engine=job.engine(),
        precision=job.training.precision,
        columns={
            op.target: SyntheticColumn(op=op.name, spec=op.outputs[0], limit=limits.get(op.target))
            for op in graph.ops
            if op.kind == "placeholder"
        },
        any_batch=graph.batch is None,
    )


def _ends(problem: Problem) -> list[int]:
    """Where the stages end: the first cuts with so much of the FLOPs before them, and the end of the model."""
    flops, whole = problem.cumulative_flops, len(problem.flow.operators)
    possible = [*(cut.position for cut in cuts(problem.flow)), whole]
    wanted = (bisect.bisect_left(possible, share * flops[-1], key=flops.__getitem__) for share in SHARES)
    return [end for end in dict.fromkeys(possible[at] for at in wanted) if flops[end]]


def _layers(problem: Problem, position: int) -> LayerStage:
    flow, end = problem.flow, len(problem.flow.operators)
    stage = partition(flow, assign(flow, [position] if position < end else []))[0]
    flops = sum((op.flops_forward + op.flops_backward for op in flow.operators[:position]), Affine(0))
    needed = bytes_of(problem, stage)
    return LayerStage(
        stage=stage,
        operators=position,
        flops=flops,
        memory_bytes=needed.weights + needed.gradients + needed.kept(recompute=False),
    )


Shape = Sequence[int]
_MATRICES = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul")
_ATTENTION = "scaled_dot_product_attention"


def operators_of(graph: OpGraph, micro_batch_size: int) -> tuple[MatrixProduct | AttentionShape, ...]:
    """Return the operators of one micro-batch's forward: linear layers and products as matrix products, and fused
    attention as it is; those that are alike counted together, the largest first. Empty for a model without any, as of
    convolutions."""
    flow, found = Flow(graph), Counter[MatrixProduct | AttentionShape]()
    for op in graph.ops:
        name = op.target.removeprefix("aten.").partition(".")[0]
        if op.kind == "operator" and name in (*_MATRICES, _ATTENTION):
            shapes = [flow.by_name[r.op].outputs[r.index].shape_at(micro_batch_size) for r in op.refs()]
            out = op.outputs[0].shape_at(micro_batch_size)
            found.update([_attention(op, shapes)] if name == _ATTENTION else _products(name, shapes, out))
    counted = [msgspec.structs.replace(operator, count=count) for operator, count in found.items()]
    return tuple(sorted(counted, key=lambda operator: -operator.flops)[:MOST_OPERATORS])


def _products(name: str, shapes: Sequence[Shape], out: Shape) -> Iterator[MatrixProduct]:
    a, b = shapes[1:] if name in ("addmm", "baddbmm") else shapes[:2]
    if name == "linear":
        yield MatrixProduct(1, math.prod(a[:-1]), b[0], a[-1])
    elif len(a) >= 2 and len(b) >= 2:
        yield MatrixProduct(math.prod(out[:-2]), a[-2], b[-1], a[-1])


def _attention(op: Op, shapes: Sequence[Shape]) -> AttentionShape:
    queries, keys, values = shapes[:3]
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), op.args[3:], strict=False)) | op.kwargs
    return AttentionShape(
        batch=math.prod(queries[:-3]),
        heads=queries[-3] if len(queries) > 2 else 1,
        key_heads=keys[-3] if len(keys) > 2 else 1,
        queries=queries[-2],
        keys=keys[-2],
        size=queries[-1],
        value_size=values[-1],
        causal=named.get("is_causal") is True,
        masked=named.get("attn_mask") is not None,
    )


HALVES: tuple[Precision, ...] = ("bf16", "fp16")


def combined_speed(ranks: Sequence[Sequence[SpeedSample]], machines: float) -> tuple[SpeedSample, ...]:
    """Return the figures of one device from those of its ranks, whose speeds add up; `machines` are so many as these.
    Kinds that not all ranks have measured are left out, and the figure of the fewest layers counts."""
    by_kind: defaultdict[tuple[str, Precision], list[SpeedSample]] = defaultdict(list)
    for figure in (figure for figures in ranks for figure in figures):
        by_kind[figure.what, figure.precision].append(figure)
    found: list[SpeedSample] = []
    for same in by_kind.values():
        if len(same) == len(ranks):
            one = min(same, key=lambda figure: figure.operators)
            speed = machines * sum(figure.flops_per_s for figure in same)
            found.append(msgspec.structs.replace(one, seconds=one.flops / speed))
    return tuple(found)


def planned_speed(figures: Sequence[SpeedSample], width: Literal["full", "half"]) -> float:
    """FLOP/s that plans go by, in fp32 or in one of its halves; 0 where nothing was measured in it.

    A stage of the model itself counts before its products and attention: it has all other operators too, the backward,
    and what it takes to call them. Those count by the time that they take together.
    """
    wanted = [figure for figure in figures if (figure.precision in HALVES) == (width == "half")]
    layers = [figure for figure in wanted if figure.what == "layers"]
    counted = layers or wanted
    return sum(f.flops for f in counted) / sum(f.seconds for f in counted) if counted else 0.0


def measurements_of(figures: Sequence[SpeedSample], operators: int) -> tuple[Measurement, ...]:
    """For people; `operators` are those of the whole model."""
    return tuple(Measurement(_named(f, operators), significant(f.flops_per_s)) for f in figures)


def _named(figure: SpeedSample, operators: int) -> str:
    what = extent(figure.operators, operators) if figure.what == "layers" else figure.what
    return f"{what} in {figure.precision}"


ANSWER_S = 60.0
COMPUTE_S = 150.0
NO_JOB = MeasureSpeed(run="")
Answer = TypeVar("Answer", bound=Message)


class Asking(Protocol):
    """Asks the devices of a fleet (`FleetCoordinator`)."""

    def ask(self, device: str, message: AnyMessage, kind: type[Answer], within_s: float) -> Answer:
        """PeerError when it does not answer."""
        ...

    def id_of(self, device: str) -> str: ...

    def wait_for(self, devices: Sequence[str], stop: Stop, *, every: bool) -> list[str]: ...


def probe_fleet(
    service: Asking,
    devices: Sequence[str],
    log: Callable[[str], None],
    asked: MeasureSpeed = NO_JOB,
    description: str = "",
) -> Fleet:
    """Measure every device, in what a job's model computes where that is asked, and every directed link between two of
    them, one after another: those at the same time would share what they measure. PeerError names who cannot be
    measured."""
    measured: list[Device] = []
    for number, device in enumerate(devices):
        log(f"measuring {device} ...")
        probe = msgspec.structs.replace(asked, run=secrets.token_hex(8))
        found = service.ask(device, probe, MeasuredSpeed, COMPUTE_S)
        measured.append(measured_device(device, f"site-{number}", found, asked, log))
    routes: list[Route] = []
    for source in devices:
        for target in devices:
            if source != target:
                log(f"measuring {source} -> {target} ...")
                routes.append(Route(source, target, probe_link(service, source, target, log)))
    slowest = Link(
        max((r.link.latency_s for r in routes), default=1e-3),
        min((r.link.bandwidth_bytes_per_s for r in routes), default=1e8),
    )
    links = Links(default=slowest, devices=tuple(routes))
    return Fleet(name="probed", description=description, devices=tuple(measured), links=links)


def measured_device(
    name: str, region: str, found: MeasuredSpeed, asked: MeasureSpeed, log: Callable[[str], None]
) -> Device:
    """Return the device as it was found. PeerError where it said nothing that plans can go by."""
    trial = asked.trial
    sizes = {"layers": {layers.operators for layers in trial.layers} if trial is not None else set[int]()}
    if wrong := [f for f in found.figures if f.operators not in sizes.get(f.what, {0})]:
        what = f"measured {wrong[0].what} of {wrong[0].operators} operators"
        raise PeerError(f"device {name!r}: {what}, for which it was not asked")
    if trial is not None and found.shorter:
        longest = next((f.operators for f in found.figures if f.what == "layers"), 0)
        instead = f"the first {longest} are measured" if longest else "no layers are measured"
        log(f"{name}: {sanitize(found.shorter)}: {instead}")
    flops_per_s, peak = planned_speed(found.figures, "full"), found.peak_flops_per_s
    if found.failure or not flops_per_s:
        why = sanitize(found.failure) or "its memory is too short for all that is measured"
        raise PeerError(f"device {name!r}: cannot measure its speed: {why}")
    try:
        return Device(
            name=name,
            region=region,
            flops_per_s=significant(peak),
            scale=significant(flops_per_s / peak),
            memory_bytes=found.memory_bytes,
            hardware=sanitize(found.hardware)[:MOST_HARDWARE].strip(),
            half_flops_per_s=significant(planned_speed(found.figures, "half")),
            host_bytes_per_s=significant(8 * found.host_bytes_per_s) / 8,
            engine=found.engine,
            measured=measurements_of(found.figures, trial.operators if trial is not None else 0),
        )
    except (UserError, ArithmeticError, ValueError) as e:  # what it said is no number that a fleet can have
        raise PeerError(f"device {name!r}: cannot measure its speed: {e}") from None


def probe_link(service: Asking, source: str, target: str, log: Callable[[str], None]) -> Link:
    probe = secrets.token_hex(8)
    there = service.ask(target, ExpectDial(run=probe, id=service.id_of(source)), ExpectingDial, ANSWER_S)
    if there.failure:
        raise PeerError(f"{source} -> {target}: {there.failure}")
    asked = MeasureLink(run=probe, host=there.host, port=there.port, id=service.id_of(target))
    found = service.ask(source, asked, LinkTimes, ANSWER_S)
    if found.failure:
        raise PeerError(f"{source} -> {target}: {found.failure}")
    if found.relayed:
        log(f"{source} -> {target}: they cannot reach each other, the coordinator relays")
    for size_bytes, seconds in found.times:
        if size_bytes not in SIZES_BYTES or not seconds > 0:
            what = f"measured messages of {size_bytes} bytes that took {seconds:g} s"
            raise PeerError(f"device {source!r}: {what}, which it cannot have")
    try:
        return measured_link(fit_link(found.times))
    except UserError as e:
        raise PeerError(f"device {source!r}: {e}") from None


def measured_link(link: Link) -> Link:
    """To as many digits as are known, in bits, as fleets are written."""
    return Link(significant(link.latency_s), significant(8 * link.bandwidth_bytes_per_s) / 8)


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


def _speed(asked: MeasureSpeed, accelerator: str, place: ProcessPlace) -> TimedWork:
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
    return msgspec.json.decode(done.stdout, type=TimedWork)


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
