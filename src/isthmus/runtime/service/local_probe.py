"""`isthmus probe` of one machine: each of its devices, and the loopback interface between their processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.fleet.fitting import fit_link
from isthmus.runtime.messages.probe import Compute
from isthmus.runtime.processes.launcher import Place
from isthmus.runtime.service.fleet_probe import NO_JOB, measured_device, measured_link
from isthmus.runtime.service.probing import answer_loads, compute_speed, time_loads
from isthmus.runtime.transport.braid import Braider
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.reaching import Reacher, Route

LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0


def probe_machine(
    machine: str, places: Mapping[str, Place], say: Callable[[str], None], asked: Compute = NO_JOB,
    description: str = "",
) -> Fleet:  # fmt: skip
    """The devices by name, one after another, as `probe_fleet` measures those of other machines. PeerError names one
    that cannot be measured."""
    devices: list[Device] = []
    for name, place in places.items():
        say(f"measuring {name} ...")
        devices.append(measured_device(name, machine, compute_speed(asked, place), asked, say))
    return Fleet(name="probed", description=description, devices=tuple(devices), links=Links(default=_loopback()))


def _loopback() -> Link:
    listener = Listener(LOOPBACK, patience_s=PATIENCE_S)
    braider = Braider(PATIENCE_S)
    listener.start(lambda channel: answer_loads(channel, "", braider, PATIENCE_S))
    try:
        here = LOOPBACK, listener.port
        reacher = Reacher(coordinator=here, identity=None, patience_s=PATIENCE_S)
        times, _ = time_loads(Route(run="", other="this machine", host=here[0], port=here[1], id=""), reacher)
    finally:
        listener.close()
    return measured_link(fit_link(times))
