"""The coordinator's part in a probe: what it asks of whom, and the fleet that follows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from isthmus.errors import PeerError
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.fleet.fitting import fit_link
from isthmus.runtime.messages.every import AnyMessage
from isthmus.runtime.messages.fleet import MOST_HARDWARE
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.probe import Compute, Computes, Expect, Expecting, Measure, Measured, Product
from isthmus.units import significant

ANSWER_S = 60.0
COMPUTE_S = 150.0
Answer = TypeVar("Answer", bound=Message)


class Asking(Protocol):
    """Who can ask the devices of a fleet (`Service`)."""

    def ask(self, device: str, message: AnyMessage, kind: type[Answer], within_s: float) -> Answer:
        """PeerError when it does not answer."""
        ...

    def id_of(self, device: str) -> str: ...


def probe_fleet(
    service: Asking, devices: Sequence[str], say: Callable[[str], None], products: Sequence[Product] = ()
) -> Fleet:
    """Measure every device, in the products of a job's model where they are given, and every directed link between two
    of them, one after another: those at the same time would share what they measure. PeerError names who cannot be
    measured."""
    measured: list[Device] = []
    for number, device in enumerate(devices):
        say(f"measuring {device} ...")
        found = service.ask(device, Compute(run=secrets.token_hex(8), products=tuple(products)), Computes, COMPUTE_S)
        if found.failure or min(found.flops_per_s, found.peak_flops_per_s) <= 0 or found.memory_bytes <= 0:
            raise PeerError(f"device {device!r}: cannot say how fast it is: {found.failure or 'no speed'}")
        measured.append(
            Device(
                name=device, region=f"site-{number}", flops_per_s=significant(found.peak_flops_per_s),
                scale=significant(found.flops_per_s / found.peak_flops_per_s), memory_bytes=found.memory_bytes,
                hardware="".join(c for c in found.hardware if c.isprintable())[:MOST_HARDWARE].strip(),
                half_flops_per_s=significant(found.half_flops_per_s),
                host_bytes_per_s=significant(8 * found.host_bytes_per_s) / 8,
            )
        )  # fmt: skip
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
    return Fleet(name="probed", devices=tuple(measured), links=Links(default=slowest, devices=tuple(routes)))


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
    link = fit_link(found.times)
    # In bits, as fleets are written.
    return Link(significant(link.latency_s), significant(8 * link.bandwidth_bytes_per_s) / 8)
