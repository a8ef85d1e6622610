"""Shared uplinks, prices of outgoing bytes, and links that change with time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, LinkTrace, Region, dump_fleet, load_fleet, parse_fleet

DEVICES = """
[[device]]
name = "a"
region = "office"
compute = "1 GFLOPS"
memory = "1 GiB"
count = 2

[[device]]
name = "b"
region = "home"
compute = "1 GFLOPS"
memory = "1 GiB"

[links]
default = { latency = "1 ms", bandwidth = "1 Gbit/s" }
"""


def test_no_link_is_faster_than_the_uplink_of_its_site():
    fleet = parse_fleet(DEVICES + '[[region]]\nregion = "office"\nuplink = "20 Mbit/s"\n', "f.toml")
    assert fleet.link("a-0", "b") == Link(0.001, 20e6 / 8)
    assert fleet.link("b", "a-0") == fleet.link("a-0", "a-1") == Link(0.001, 1e9 / 8)
    assert fleet.uplink("a-0", "b") == Region(region="office", uplink_bytes_per_s=20e6 / 8)
    assert fleet.uplink("a-0", "a-1") is None
    assert fleet.uplink("b", "a-0") is None


def test_a_site_that_only_costs_money_limits_nothing():
    fleet = parse_fleet(DEVICES + '[[region]]\nregion = "office"\negress_price_per_gb = 0.09\n', "f.toml")
    assert fleet.region_info_of("office").egress_price_per_gb == 0.09
    assert fleet.region_info_of("home").egress_price_per_gb == 0
    assert fleet.uplink("a-0", "b") is None


def test_thinning_keeps_the_sites_that_are_left():
    fleet = parse_fleet(DEVICES + '[[region]]\nregion = "home"\nuplink = "1 Mbit/s"\n', "f.toml")
    assert fleet.thin(2).region_info == fleet.region_info
    assert fleet.thin(1).region_info == ()


@pytest.mark.parametrize(
    "text, words",
    [
        ('[[region]]\nregion = "offise"\n', ["offise", "office"]),
        ('[[region]]\nregion = "office"\n[[region]]\nregion = "office"\n', ["2 sites", "office"]),
        ('[[region]]\nregion = "office"\nuplink = "20 Mbit"\n', ["[[region]] 1", "uplink", "20 Mbit"]),
        ('[[region]]\nregion = "office"\nuplink = "0 Mbit/s"\n', ["uplink"]),
        ('[[region]]\nregion = "office"\nuplnk = "20 Mbit/s"\n', ["uplnk", "uplink"]),
        ('[[region]]\nregion = "office"\negress_price_per_gb = -1\n', ["egress_price_per_gb", "-1"]),
        ('[[link]]\nfrom = "office"\nto = "home"\nlatency = "1 ms"\n', ["[[link]] 1", "bandwidth", "missing"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = "none.csv"\n', ["none.csv", "trace"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = []\n', ["trace", "at least one"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = [[1, 1, 1]]\n', ["trace", "first time", "0"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = [[0, 1, 1], [0, 1, 1]]\n', ["trace", "rising"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = [[0, 1]]\n', ["row 1", "[time, latency, bandwidth]"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = [[0, "1 mss", 1]]\n', ["row 1", "latency", "1 mss"]),
        ('[[link]]\nfrom = "office"\nto = "home"\ntrace = [[0, 1, 1]]\nlatency = "1 ms"\n', ["trace", "latency"]),
    ],
)
def test_what_is_wrong_is_named(text: str, words: list[str]):
    with pytest.raises(UserError) as refused:
        parse_fleet(DEVICES + text, "f.toml")
    for word in words:
        assert word in str(refused.value)


def _fleet_with(folder: Path, csv: str) -> Fleet:
    (folder / "wan.csv").write_text(csv)
    path = folder / "f.toml"
    path.write_text(DEVICES + '[[link]]\nfrom = "office"\nto = "home"\ntrace = "wan.csv"\n')
    return load_fleet(path)


def test_a_trace_is_read_from_beside_the_fleet_with_its_columns_in_any_order(tmp_path: Path):
    rows = "0 s, 80 Mbit/s, 20 ms\n60, 40 Mbit/s, 40 ms\n\n180,1e6,0.1\n"
    fleet = _fleet_with(tmp_path, "time, bandwidth, latency\n" + rows)
    link = fleet.link("a-1", "b")
    assert link.trace == LinkTrace((0.0, 60.0, 180.0), (0.02, 0.04, 0.1), (10e6, 5e6, 1e6))
    # 60 s of the first sample and 120 s of the second; the last has no end.
    assert link.bandwidth_bytes_per_s == pytest.approx(20e6 / 3)
    assert link.latency_s == pytest.approx(0.1 / 3)


@pytest.mark.parametrize(
    "csv, words",
    [
        ("time,latency\n0,1\n", ["columns", "bandwidth"]),
        ("", ["columns", "time, latency, bandwidth"]),
        ("time,latency,bandwidth\n0,1\n", ["row 1", "2 cells"]),
        ("time,latency,bandwidth\n0,1,fast\n", ["row 1", "bandwidth", "fast"]),
        ("time,latency,bandwidth\n", ["at least one"]),
        (f"time,latency,bandwidth\n0,{'9' * 5000},1\n", ["row 1", "latency", "finite"]),
        (f"time,latency,bandwidth\n0,1,{'9' * 200_000}\n", ["cannot read", "field larger"]),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, csv: str, words: list[str]):
    with pytest.raises(UserError) as refused:
        _fleet_with(tmp_path, csv)
    for word in ["wan.csv", *words]:
        assert word in str(refused.value)


@given(
    steps=st.lists(st.floats(0.1, 10), max_size=5),
    bandwidths=st.lists(st.floats(1, 1e6), min_size=6, max_size=6),
    start_s=st.floats(0, 60),
    size=st.floats(0, 1e7),
)
def test_the_bytes_that_a_trace_passes_are_the_area_below_it(
    steps: list[float], bandwidths: list[float], start_s: float, size: float
):
    times = [0.0]
    for step in steps:
        times.append(times[-1] + step)
    trace = LinkTrace(tuple(times), tuple(0.0 for _ in times), tuple(bandwidths[: len(times)]))
    end_s = trace.sent_s(start_s, size)
    area = 0.0
    for i, bandwidth in enumerate(trace.bandwidth_bytes_per_s):
        until_s = times[i + 1] if i + 1 < len(times) else float("inf")
        area += bandwidth * max(0.0, min(end_s, until_s) - max(start_s, times[i]))
    assert area == pytest.approx(size, rel=1e-6, abs=1e-6)


def test_toml_and_back():
    fleet = Fleet(
        name="f",
        devices=(
            Device(name="a", region="x", flops_per_s=1e9, memory_bytes=1),
            Device(name="b", region="y", flops_per_s=1e9, memory_bytes=1),
        ),
        links=Links(default=LinkTrace((0.0, 0.7), (0.1, 1 / 3), (1e6, 2e6)).mean()),
        region_info=(Region(region="x", uplink_bytes_per_s=1e6 / 3), Region(region="y", egress_price_per_gb=0.05)),
    )
    assert parse_fleet(dump_fleet(fleet), "g.toml") == fleet
