"""Devices behind the kernel's own NATs reach each other: directly wherever a NAT of the kind can be passed."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from isthmus.api.folder import RunFolder
from isthmus.errors import PeerError
from isthmus.fleet import Device, Link, Links
from isthmus.fleet import Fleet as DeviceFleet
from isthmus.job import load_job, prepare
from isthmus.runtime.service.status_file import read_status
from isthmus.runtime.transport import relay, rendezvous
from isthmus.runtime.transport.channel import SocketChannel
from isthmus_testing.lab import COORDINATOR, Home, Kind, Lab, inside, lab_unavailable, nat_unavailable
from tests.runtime.commands import edited, write_job
from tests.runtime.jobs import plain_run

from .parties import Fleet, ReachableDevice, soon
from .test_fleet_faults import FLEET, RUNTIME
from .test_two_machines import Machines, Place

LINK = Link(0.005, 12.5e6)
LIMIT_S = 300.0
PRIVATE = "192.168.1.2"
"""Of every home's device: who dials it reaches a device of the own home."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if reason := lab_unavailable():
        pytest.skip(reason)
    names = ("oslo", "porto")
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=1e9, memory_bytes=1 << 30) for n in names)
    with Lab(DeviceFleet(name="homes", devices=devices, links=Links(default=LINK)), coordinator_link=LINK) as lab:
        if reason := nat_unavailable(lab):
            pytest.skip(reason)
        yield lab


@pytest.fixture(scope="module")
def remote(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The coordinator, at an address of its own."""
    folder = tmp_path_factory.mktemp("remote")
    fleet = inside(lab.network(COORDINATOR), lambda: Fleet(folder / "fleet", host=lab.addresses[COORDINATOR]))
    yield fleet
    fleet.service.close()
    fleet.state.close()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """For so long direct ways are tried: not where there are none, and on a busy machine for as long as it takes."""
    return lambda relayed: monkeypatch.setattr(rendezvous, "DIRECT_S", 0.5 if relayed else 20.0)


@contextlib.contextmanager
def _devices(
    fleet: Fleet, folder: Path, near: str, far: str, timeout_s: float = 5.0
) -> Generator[tuple[ReachableDevice, ReachableDevice]]:
    """In these two networks."""
    with contextlib.ExitStack() as stack:
        found: list[ReachableDevice] = []
        for name, network in (("near", near), ("far", far)):
            name = f"{name}-{folder.name}"
            device = inside(
                network, lambda name=name: ReachableDevice(fleet, folder, name, host="0.0.0.0", timeout_s=timeout_s)
            )
            stack.callback(device.close)
            device.host = PRIVATE
            found.append(device)
        yield found[0], found[1]


def _relayed(near: ReachableDevice, network: str, far: ReachableDevice) -> tuple[bool, SocketChannel]:
    """Whether the connection is, which then is used."""
    channel, relayed = inside(network, lambda: near.dialer.dial(far.route(direct=True)))
    theirs = far.came.get(timeout=60)
    assert channel.party is not None and channel.party.id == far.identity.id
    assert theirs.party is not None and theirs.party.id == near.identity.id
    return relayed, channel


@pytest.mark.parametrize(
    ("near", "far", "relayed"),
    [
        ("full-cone", "symmetric", False),
        ("symmetric", "restricted", False),
        ("port-restricted", "refusing", False),
        ("port-restricted", "symmetric", True),
    ],
)
def test_the_way_between_two_homes(
    lab: Lab, remote: Fleet, tmp_path: Path, limit: Callable[[bool], None], near: Kind, far: Kind, relayed: bool
) -> None:
    limit(relayed)
    with (
        Home(lab, "oslo", near) as oslo,
        Home(lab, "porto", far) as porto,
        _devices(remote, tmp_path, oslo.network(), porto.network()) as (ours, theirs),
    ):
        found, channel = _relayed(ours, oslo.network(), theirs)
        channel.close()
        assert found is relayed


def test_ipv6_needs_no_relay(lab: Lab, remote: Fleet, tmp_path: Path, limit: Callable[[bool], None]) -> None:
    limit(False)
    with (
        Home(lab, "oslo", "symmetric", ipv6=True) as oslo,
        Home(lab, "porto", "symmetric", ipv6=True) as porto,
        _devices(remote, tmp_path, oslo.network(), porto.network()) as (ours, theirs),
    ):
        relayed, channel = _relayed(ours, oslo.network(), theirs)
        channel.close()
        assert not relayed


@pytest.mark.parametrize("hairpin", [True, False])
def test_two_devices_of_one_home_that_sees_them_apart(
    lab: Lab, remote: Fleet, tmp_path: Path, limit: Callable[[bool], None], hairpin: bool
) -> None:
    limit(not hairpin)
    with (
        Home(lab, "oslo", "port-restricted", devices=2, hairpin=hairpin) as home,
        _devices(remote, tmp_path, home.network(0), home.network(1)) as (ours, theirs),
    ):
        relayed, channel = _relayed(ours, home.network(0), theirs)
        channel.close()
        assert relayed is not hairpin


def test_a_home_that_gets_another_address_is_found_again(
    lab: Lab, remote: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device notices that its connection to the coordinator is dead; until then it cannot be reached."""
    monkeypatch.setattr(relay, "WAIT_S", 0.5)
    monkeypatch.setattr(rendezvous, "DIRECT_S", 1.5)
    with (
        Home(lab, "oslo", "port-restricted") as oslo,
        Home(lab, "porto", "port-restricted") as porto,
        _devices(remote, tmp_path, oslo.network(), porto.network(), timeout_s=1.5) as (ours, theirs),
    ):
        relayed, channel = _relayed(ours, oslo.network(), theirs)
        channel.close()
        assert not relayed
        porto.move("10.99.0.77")
        found: list[bool] = []

        def reached() -> bool:
            with contextlib.suppress(PeerError):
                relayed, channel = _relayed(ours, oslo.network(), theirs)
                channel.close()
                found.append(relayed)
            return bool(found)

        soon(reached)
        assert found == [False]


@pytest.mark.long
def test_training_goes_on_where_a_home_gets_another_address(lab: Lab, tmp_path: Path) -> None:
    """Both devices are behind NATs. Their link is direct before and after; the losses are those of a plain loop. The
    run has no end of its own: how long the home is away depends on the machine."""
    (tmp_path / "fleet.toml").write_text(FLEET.replace('"d0"', '"oslo"').replace('"d1"', '"porto"'))
    job = edited(
        write_job(tmp_path, steps=1_000_000, fleet=str(tmp_path / "fleet.toml")),
        ("eval_every = 5\n", ""),
        ("save_every = 3\n", "save_every = 0\n"),
        ('[learning_rate]\nschedule = "cosine"', RUNTIME),
    )
    with Home(lab, "oslo", "port-restricted") as oslo, Home(lab, "porto", "port-restricted") as porto:
        commands = {"oslo": oslo.command(), "porto": porto.command(), COORDINATOR: lab.command(COORDINATOR)}
        machines = Machines(Place(commands.__getitem__, str), tmp_path)
        run = RunFolder(tmp_path / "run")
        where = f"--host {lab.addresses[COORDINATOR]} --state {tmp_path}/fleet --run {run.path}"
        serve = machines.start(COORDINATOR, f"isthmus serve {job} {where} --tickets 2")
        try:
            assert serve.stdout is not None
            for site in ("oslo", "porto"):
                machines.start(site, f"isthmus join --name {site} --timeout '5 s'", serve.stdout.readline())
            soon(lambda: len(run.losses()) >= 10, LIMIT_S)
            assert _ways(tmp_path / "fleet") == [False]
            porto.move("10.99.0.77")
            soon(lambda: "'porto' was lost" in machines.description(), LIMIT_S)
            lost_s = time.time()
            soon(lambda: _ways(tmp_path / "fleet", lost_s), LIMIT_S)
            assert _ways(tmp_path / "fleet") == [False]
            together = len(run.losses())
            soon(lambda: len(run.losses()) >= together + 10, LIMIT_S)
            serve.send_signal(signal.SIGINT)
            assert serve.wait(LIMIT_S) == 130, machines.description()
        finally:
            machines.end()
    losses = [point.loss for point in run.losses()]
    done = load_job(edited(job, ("steps = 1000000", f"steps = {len(losses)}")))
    _, expected = plain_run(done, prepare(done))
    assert losses == pytest.approx(expected, rel=1e-6)


def _ways(folder: Path, since_s: float = 0.0) -> list[bool]:
    """Whether each link between devices at work is relayed; none where the status is older."""
    status = read_status(folder)
    assert status is not None
    return [link.relayed for link in status.links] if status.at_s > since_s else []
