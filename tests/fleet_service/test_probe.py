"""Devices that measure each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from isthmus.errors import PeerError
from isthmus.fleet import parse_fleet
from isthmus.fleet.toml import dump_fleet
from isthmus.runtime.identity import Identity
from isthmus.runtime.messages.probe import ExpectDial, MeasuredSpeed, MeasureLink, MeasureSpeed, SpeedSample
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service import agent as agents
from isthmus.runtime.service import fleet_probe
from isthmus.runtime.service.agent import Agent, join_fleet
from isthmus.runtime.service.fleet_probe import probe_fleet, probe_link
from isthmus.runtime.service.speed import CHANNELS, KERNEL, LAYERS, TimedWork, conv_flops
from isthmus.runtime.transport.rendezvous import PeerDialer, PeerRoute
from tests.runtime.commands import isthmus, refused

from .parties import Fleet, in_background


@pytest.fixture
def two(fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    made: list[Agent] = []
    for name in ("desk", "laptop"):
        membership = join_fleet(fleet.ticket(), {name: tmp_path / name}, 5.0)[name]
        made.append(Agent(tmp_path / name, membership, ProcessPlace(), timeout_s=5.0, log=lambda _: None))
    desk, laptop = made
    with in_background(desk.run, desk.stop), in_background(laptop.run, laptop.stop):
        fleet.service.wait_for(["desk", "laptop"])
        yield fleet


def _computes(asked: MeasureSpeed, *_: object) -> MeasuredSpeed:
    figure = SpeedSample(what="convolutions", precision="fp32", flops=2e9, seconds=1.0)
    return MeasuredSpeed(run=asked.run, figures=(figure,), peak_flops_per_s=8e9, memory_bytes=9)


def test_a_probed_fleet(two: Fleet) -> None:
    with (
        mock.patch.object(agents, "compute_speed", _computes),
        mock.patch.object(fleet_probe, "SIZES_BYTES", (1 << 8, 1 << 17, 1 << 20)),
    ):
        found = probe_fleet(two.service, ["desk", "laptop"], lambda _: None)
    devices = parse_fleet(dump_fleet(found), "probed").devices
    assert [(d.name, d.flops_per_s, d.scale, d.memory_bytes) for d in devices] == [
        ("desk", 8e9, 0.25, 9),
        ("laptop", 8e9, 0.25, 9),
    ]
    assert {d.sustained_flops_per_s for d in devices} == {2e9}
    for source, target in (("desk", "laptop"), ("laptop", "desk")):
        link = found.link(source, target)
        assert 0 < link.latency_s < 1 and link.bandwidth_bytes_per_s > 1e5
    figures = [text for text in re.findall(r'"([\d.]+) [^"]*"', dump_fleet(found)) if len(text.strip("0.")) > 5]
    assert not figures, "what was measured has four digits"
    assert parse_fleet(dump_fleet(found), "probed").names == ("desk", "laptop")


def test_more_streams_are_tried_where_they_might_be_faster_and_kept_where_they_are(two: Fleet) -> None:
    """As if one flow carried 10 MB/s over 200 ms, two 18, and four no more than that."""
    speeds = {1: 1e7, 2: 1.8e7, 4: 1.8e7}
    used: list[int] = []
    timed = fleet_probe.time_loads

    def slow(route: PeerRoute, dialer: PeerDialer) -> tuple[list[tuple[int, float]], bool]:
        used.append(route.streams)
        times, relayed = timed(route, dialer)
        return [(size, 0.4 + size / speeds[route.streams]) for size, _ in times], relayed

    with (
        mock.patch.object(fleet_probe, "time_loads", slow),
        mock.patch.object(fleet_probe, "SIZES_BYTES", (1 << 8, 1 << 20)),
    ):
        link = probe_link(two.service, "desk", "laptop", lambda _: None)
    assert used == [1, 2, 4]
    assert link.bandwidth_bytes_per_s == pytest.approx(1.8e7) and link.latency_s == pytest.approx(0.2)


def test_a_link_of_long_latency_is_measured(two: Fleet) -> None:
    """Trips of next to nothing take longer than all trips of a quick link."""
    with mock.patch.object(fleet_probe, "_round_trip", lambda _, __, size_bytes, ___: 1.2 + size_bytes / 1e6):
        link = probe_link(two.service, "desk", "laptop", lambda _: None)
    assert link.latency_s == pytest.approx(0.6) and link.bandwidth_bytes_per_s == pytest.approx(1e6)


def test_who_cannot_be_reached_is_named(two: Fleet) -> None:
    refuse = mock.patch.object(PeerDialer, "dial", side_effect=PeerError("the other device: cannot connect"))
    with refuse, pytest.raises(PeerError, match=r"^desk -> laptop: the other device: cannot connect$"):
        probe_link(two.service, "desk", "laptop", lambda _: None)


def test_who_does_not_answer_is_named(two: Fleet) -> None:
    silent = mock.patch.object(Agent, "_beside")
    hasty = mock.patch.object(fleet_probe, "ANSWER_S", 0.3)
    with silent, hasty, pytest.raises(PeerError, match=r"device 'desk': did not answer for 0\.3 s"):
        probe_link(two.service, "desk", "laptop", lambda _: None)


def _dialer(fleet: Fleet, identity: Identity) -> PeerDialer:
    return PeerDialer(coordinator=("127.0.0.1", fleet.service.port), identity=identity, timeout_s=5.0)


def test_only_the_expected_device_is_measured(two: Fleet, tmp_path: Path) -> None:
    desk, laptop = Identity(tmp_path / "desk"), Identity(tmp_path / "laptop")
    where, close = fleet_probe.expect_probe(
        ExpectDial(run="p", id="0" * 32), _dialer(two, laptop), ProcessPlace(host="127.0.0.1")
    )
    asked = MeasureLink(run="p", host=where.host, port=where.port, id=laptop.id)
    assert "the other device" in fleet_probe.measure_link(asked, _dialer(two, desk)).failure
    close()


def test_the_benchmarks_flops_are_those_that_torch_counts() -> None:
    stack = torch.nn.Sequential(*[torch.nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1) for _ in range(LAYERS)])
    with FlopCounterMode(display=False) as counted:
        stack(torch.randn(1, CHANNELS, 4, 4)).sum().backward()
    assert conv_flops(4) == counted.get_total_flops()


@pytest.mark.parametrize(("given", "told"), [(None, 50), (30, 15), (1000, 50)])
def test_a_device_offers_what_its_owner_gives(given: int | None, told: int) -> None:
    figure = SpeedSample(what="convolutions", precision="fp32", flops=1.0, seconds=1.0)
    one = TimedWork(figures=(figure,), peak_flops_per_s=2.0, memory_bytes=100)
    with mock.patch.object(fleet_probe, "_speed", lambda *_: one):
        found = fleet_probe.compute_speed(
            MeasureSpeed(run="p"), ProcessPlace(memory_bytes=given, ranks=2, local_ranks=2)
        )
    assert (found.memory_bytes, found.figures[0].flops_per_s, found.failure) == (told, 2.0, "")


@pytest.mark.parametrize(("text", "words"), [("4 Gib", "--memory"), ("0 B", "--memory '0 B': got nothing")])
def test_memory_that_is_no_size_is_a_slip(tmp_path: Path, text: str, words: str) -> None:
    refused(isthmus("join", "--memory", text, "--state", tmp_path / "state"), 2, words)
