"""The coordinator's part in a probe: what it asks of whom, and the fleet that follows.

The questions of a probe to devices for a job: its model's operators, and its model's first layers as stages.

Sky Computing (sec. IV-B) times "the first few layers of the training model". More layers are nearer to the whole, and
take longer, and more memory: stages of about 1/128, 1/64, ..., 1/2 and all of the model's FLOPs are sent, and each
device measures them one after another as far as they fit and are quick.
"""

from __future__ import annotations

import bisect
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import bytes_of
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Measurement, Route
from isthmus.fleet.fleet import fit_link
from isthmus.graph import Affine, Flow, Op, OpGraph, assign, cuts, partition
from isthmus.job import Prepared
from isthmus.job.settings import Precision
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
    MatrixProduct,
    MeasuredSpeed,
    MeasureLink,
    MeasureSpeed,
    SpeedSample,
    SyntheticColumn,
)
from isthmus.runtime.processes.signals import Stop
from isthmus.sanitize import sanitize
from isthmus.units import significant

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


def extent(operators: int, whole: int) -> str:
    """Return the text that says which layers are measured."""
    return f"all {whole} operators" if operators == whole else f"the first {operators} of {whole} operators"


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
