"""`isthmus probe` of one machine: each of its devices, and the loopback interface between their processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.fleet.changes import fit_link
from isthmus.runtime.messages.probe import MeasureSpeed
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.device_probe import answer_loads, compute_speed, time_loads
from isthmus.runtime.service.fleet_probe import NO_JOB, measured_device, measured_link
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.multi_stream import StreamAssembler
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute

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
