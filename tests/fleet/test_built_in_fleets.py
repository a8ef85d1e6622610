"""The built-in fleets hold the figures of their sources."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.fleet import Fleet, built_in_fleet, built_in_names, describe, dump_fleet, parse_fleet, resolve_fleet
from isthmus.fleet.built_in import random_fleet

DTFM = tuple(f"dtfm-case{case}" for case in range(1, 6))


def between(fleet: Fleet, a: str, b: str) -> tuple[float, float]:
    """Latency in ms and bandwidth in Gbit/s between a device of region `a` and another of region `b`."""
    source = next(device.name for device in fleet.devices if device.region == a)
    target = next(device.name for device in fleet.devices if device.region == b and device.name != source)
    link = fleet.link(source, target)
    return link.latency_s * 1e3, link.bandwidth_bytes_per_s * 8 / 1e9


def test_the_names() -> None:
    assert built_in_names() == (
        *DTFM,
        "fluidstack",
        "fusionllm-testbed1",
        "fusionllm-testbed2",
        "laptop",
        "parrot-a",
        "parrot-b",
        "parrot-c",
        "sky-16",
        "sky-32",
        "sky-64",
        "three-sites",
    )
    with pytest.raises(UserError, match="unknown fleet 'three-site': did you mean 'three-sites'"):
        built_in_fleet("three-site")


@pytest.mark.parametrize("name", built_in_names())
def test_each_has_its_name_one_line_about_it_and_survives_a_dump(name: str) -> None:
    fleet = built_in_fleet(name)
    assert fleet.name == name
    assert describe(name) and len(describe(name).splitlines()) == 1
    assert parse_fleet(dump_fleet(fleet), "f.toml") == fleet


@pytest.mark.parametrize("name", DTFM)
def test_dtfm_has_64_v100(name: str) -> None:
    devices = built_in_fleet(name).devices
    assert len(devices) == 64
    assert {(d.flops_per_s, d.memory_bytes, d.hardware) for d in devices} == {(125e12, 16 * 2**30, "NVIDIA V100")}


@pytest.mark.parametrize(
    ("name", "a", "b", "latency_ms", "bandwidth_gbit"),
    [
        ("dtfm-case1", "instance-0", "instance-0", 0, 1200),  # NVLink, 150 GB/s each way
        ("dtfm-case1", "instance-0", "instance-7", 0, 25),
        ("dtfm-case2", "instance-3", "instance-3", 0, 100),
        ("dtfm-case2", "instance-3", "instance-4", 0, 10),
        ("dtfm-case2", "instance-3", "singles", 0, 10),
        ("dtfm-case2", "singles", "singles", 0, 10),
        ("dtfm-case3", "ohio", "ohio", 1, 10),
        ("dtfm-case3", "virginia", "ohio", 10, 1.12),
        ("dtfm-case4", "oregon", "oregon", 5, 2),
        ("dtfm-case4", "california", "virginia", 59, 1.05),
        ("dtfm-case4", "ohio", "oregon", 49, 1.10),
        ("dtfm-case4", "virginia", "oregon", 67, 1.15),
        ("dtfm-case5", "tokyo", "tokyo", 5, 2),
        ("dtfm-case5", "oregon", "virginia", 67, 1.15),
        ("dtfm-case5", "virginia", "london", 76, 0.364),
        ("dtfm-case5", "frankfurt", "tokyo", 235, 0.36),
        ("dtfm-case5", "seoul", "london", 238, 0.342),
        ("dtfm-case5", "ireland", "seoul", 228, 0.335),
        ("dtfm-case5", "london", "ireland", 12, 1.09),
        ("dtfm-case5", "ohio", "frankfurt", 99, 0.799),
        ("fluidstack", "us-mid", "us-mid", 0.5, 10.40),
        ("fluidstack", "us-east", "us-east", 0.5, 11.98),
        ("fluidstack", "us-mid", "us-east", 21.8, 3.87),
        ("fluidstack", "us-east", "us-mid", 21.8, 3.73),
        ("three-sites", "home", "home", 0.5, 1),
        ("three-sites", "home", "cloud", 80, 0.02),
        ("laptop", "desk", "desk", 0.1, 1),
    ],
)
def test_links(name: str, a: str, b: str, latency_ms: float, bandwidth_gbit: float) -> None:
    assert between(built_in_fleet(name), a, b) == pytest.approx((latency_ms, bandwidth_gbit))


def test_dtfm_regions() -> None:
    sizes = {
        name: [sum(d.region == r for d in built_in_fleet(name).devices) for r in built_in_fleet(name).regions]
        for name in DTFM
    }
    assert list(sizes.values()) == [[8] * 8, [4] * 8 + [32], [32] * 2, [16] * 4, [8] * 8]


def test_fluidstack_and_three_sites_devices() -> None:
    rented = built_in_fleet("fluidstack").devices
    assert [(d.flops_per_s, d.memory_bytes) for d in rented] == [(149.7e12, 48 * 10**9)] * 32
    sites = built_in_fleet("three-sites")
    assert sites.names == ("home-0", "home-1", "office-0", "cloud-0")
    assert [d.flops_per_s for d in sites.devices] == [6e9, 6e9, 12e9, 18e9]
    assert {d.memory_bytes for d in sites.devices} == {2 * 2**30}


def test_thinning_case_5_to_eight_keeps_one_device_of_each_region() -> None:
    fleet = built_in_fleet("dtfm-case5").thin(8)
    assert [device.region for device in fleet.devices] == list(built_in_fleet("dtfm-case5").regions)
    assert len({device.region for device in built_in_fleet("dtfm-case5").thin(5).devices}) == 5


def test_fluidstack_links() -> None:
    ways = [between(built_in_fleet("fluidstack"), *pair) for pair in (("us-mid", "us-east"), ("us-east", "us-mid"))]
    assert tuple(map(statistics.mean, zip(*ways, strict=True))) == pytest.approx((21.8, 3.8))


def test_resolving_a_name_or_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(dump_fleet(built_in_fleet("laptop")), encoding="utf-8")
    assert resolve_fleet("laptop") is built_in_fleet("laptop")
    assert resolve_fleet(str(path)) == built_in_fleet("laptop")
    with pytest.raises(UserError, match=r"unknown fleet 'labtop': did you mean 'laptop'.*ends in .toml"):
        resolve_fleet("labtop")
    with pytest.raises(UserError, match="No such file"):
        resolve_fleet(str(tmp_path / "none.toml"))


def test_fusionllm_testbeds_are_of_the_stated_kinds_and_range() -> None:
    for number in (1, 2):
        fleet = built_in_fleet(f"fusionllm-testbed{number}")
        found = Counter(device.hardware for device in fleet.devices)
        assert found == {"NVIDIA RTX 4090": 8 * number, "NVIDIA RTX 2080": 16 * number}
        bandwidths = [route.link.bandwidth_bytes_per_s * 8 for route in fleet.links.regions]
        assert 8e6 <= min(bandwidths) < 50e6 and 1e9 < max(bandwidths) <= 10e9
        ways = {(route.source, route.target): route.link for route in fleet.links.regions}
        assert all(ways[target, source] == link for (source, target), link in ways.items())


@pytest.mark.parametrize("nodes", (16, 32, 64))
def test_sky_leaves_out_its_server_and_slows_down_by_1_to_7(nodes: int) -> None:
    devices = built_in_fleet(f"sky-{nodes}").devices
    slow_downs = [9.3e12 / device.flops_per_s - 1 for device in devices]
    assert len(devices) == nodes - 1
    assert 1 <= min(slow_downs) < max(slow_downs) <= 7
    assert 3 < statistics.fmean(slow_downs) < 5


def test_parrot_clusters() -> None:
    assert [len(built_in_fleet(f"parrot-{cluster}").devices) for cluster in "abc"] == [32, 8, 8]
    mixed = built_in_fleet("parrot-c").devices
    assert Counter(d.hardware for d in mixed) == {
        "NVIDIA Tesla K80": 4,
        "NVIDIA Tesla P40": 4,
    }
    assert built_in_fleet("parrot-a").link("node-0-gpu-0", "node-1-gpu-0").bandwidth_bytes_per_s == 10e9 / 8


def test_a_random_fleet_is_drawn_from_its_name() -> None:
    fleet = resolve_fleet("random:50:3")
    assert fleet == random_fleet(50, 3) != random_fleet(50, 4)
    assert (len(fleet.devices), len(fleet.regions)) == (50, 7)
    assert parse_fleet(dump_fleet(fleet), "f.toml") == fleet
    speeds = sorted(device.flops_per_s for device in resolve_fleet("random:10000:1").devices)
    assert speeds[-1] > 20 * speeds[len(speeds) // 2]  # a heavy tail


def test_latency_on_the_globe_obeys_the_triangle_inequality() -> None:
    fleet = resolve_fleet("random:36:9")
    first = {region: next(d.name for d in fleet.devices if d.region == region) for region in fleet.regions}
    for a, b, c in itertools.permutations(first.values(), 3):
        assert fleet.link(a, c).latency_s <= fleet.link(a, b).latency_s + fleet.link(b, c).latency_s


@pytest.mark.parametrize("name", ("random:0:1", "random:100001:1", "random:10", "random:a:b", "random:5:-1"))
def test_bad_random_names(name: str) -> None:
    with pytest.raises(UserError, match="random"):
        resolve_fleet(name)
