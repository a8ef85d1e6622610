"""The coordinator's part in a probe: what it asks of whom, and the fleet that follows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.fleet.fitting import fit_link
from isthmus.plain import plain
from isthmus.runtime.messages.every import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.probe import Compute, Computes, Expect, Expecting, Measure, Measured
from isthmus.runtime.service.figures import planned_speed, told
from isthmus.units import significant

ANSWER_S = 60.0
COMPUTE_S = 150.0
NO_JOB = Compute(run="")
Answer = TypeVar("Answer", bound=Message)


class Asking(Protocol):
    """Who can ask the devices of a fleet (`Service`)."""

    def ask(self, device: str, message: AnyMessage, kind: type[Answer], within_s: float) -> Answer:
        """PeerError when it does not answer."""
        ...

    def id_of(self, device: str) -> str: ...


def probe_fleet(
    service: Asking, devices: Sequence[str], say: Callable[[str], None], asked: Compute = NO_JOB, description: str = ""
) -> Fleet:
    """Measure every device, in what a job's model computes where that is asked, and every directed link between two of
    them, one after another: those at the same time would share what they measure. PeerError names who cannot be
    measured."""
    measured: list[Device] = []
    for number, device in enumerate(devices):
        say(f"measuring {device} ...")
        probe = msgspec.structs.replace(asked, run=secrets.token_hex(8))
        found = service.ask(device, probe, Computes, COMPUTE_S)
        measured.append(measured_device(device, f"site-{number}", found, asked, say))
    routes: list[Route] = []
    for source in devices:
        for target in devices:
            if source != target:
                say(f"measuring {source} -> {target} ...")
                routes.append(Route(source, target, probe_link(service, source, target, say)))
    slowest = Link(
        max((r.link.latency_s for r in routes), default=1e-3),
        min((r.link.bandwidth_bytes_per_s for r in routes), default=1e8),
    )
    links = Links(default=slowest, devices=tuple(routes))
    return Fleet(name="probed", description=description, devices=tuple(measured), links=links)


def measured_device(
    name: str, region: str, found: Computes, asked: Compute, say: Callable[[str], None]
) -> Device:  # fmt: skip
    """As it was found. PeerError where it said nothing that plans can go by."""
    trial = asked.trial
    if trial is not None and found.shorter:
        longest = next((f.operators for f in found.figures if f.what == "layers"), 0)
        instead = f"the first {longest} are measured" if longest else "no layers are measured"
        say(f"{name}: {plain(found.shorter)}: {instead}")
    flops_per_s, peak = planned_speed(found.figures, "full"), found.peak_flops_per_s
    if found.failure or not flops_per_s:
        why = plain(found.failure) or "its memory is too short for all that is measured"
        raise PeerError(f"device {name!r}: cannot say how fast it is: {why}")
    try:
        return Device(
            name=name, region=region, flops_per_s=significant(peak), scale=significant(flops_per_s / peak),
            memory_bytes=found.memory_bytes, hardware=plain(found.hardware)[:MOST_HARDWARE].strip(),
            half_flops_per_s=significant(planned_speed(found.figures, "half")),
            host_bytes_per_s=significant(8 * found.host_bytes_per_s) / 8,
            measured=told(found.figures, trial.operators if trial is not None else 0),
        )  # fmt: skip
    except (UserError, ArithmeticError, ValueError) as e:  # what it said is no number that a fleet can have
        raise PeerError(f"device {name!r}: cannot say how fast it is: {e}") from None


def probe_link(service: Asking, source: str, target: str, say: Callable[[str], None]) -> Link:
    probe = secrets.token_hex(8)
    there = service.ask(target, Expect(run=probe, id=service.id_of(source)), Expecting, ANSWER_S)
    if there.failure:
        raise PeerError(f"{source} -> {target}: {there.failure}")
    asked = Measure(run=probe, host=there.host, port=there.port, id=service.id_of(target))
    found = service.ask(source, asked, Measured, ANSWER_S)
    if found.failure:
        raise PeerError(f"{source} -> {target}: {found.failure}")
    if found.relayed:
        say(f"{source} -> {target}: they cannot reach each other, the coordinator relays")
    return measured_link(fit_link(found.times))


def measured_link(link: Link) -> Link:
    """To as many digits as are known, in bits, as fleets are written."""
    return Link(significant(link.latency_s), significant(8 * link.bandwidth_bytes_per_s) / 8)
