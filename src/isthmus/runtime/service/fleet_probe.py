"""The coordinator's part in a probe: what it asks of whom, and the fleet that follows."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Measurement, Route
from isthmus.fleet.fleet import fit_link
from isthmus.job.settings import Precision
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.probe import (
    SIZES_BYTES,
    ExpectDial,
    ExpectingDial,
    LinkTimes,
    MeasuredSpeed,
    MeasureLink,
    MeasureSpeed,
    SpeedSample,
)
from isthmus.runtime.processes.signals import Stop
from isthmus.sanitize import sanitize
from isthmus.units import significant

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
