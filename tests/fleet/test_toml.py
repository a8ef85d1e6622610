"""Fleets as people write them: what each key does, what each slip is told, and out again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Route, dump_fleet, load_fleet, parse_fleet

FULL = """
name = "two-offices"
description = "two offices and a cloud"

[[device]]
name = "gpu"
region = "office"
compute = "10 GFLOPS"
memory = "16 GiB"
count = 2
price_per_hour = 1.2
hardware = "NVIDIA A40"

[[device]]
name = "big"
region = "cloud"
compute = 2e12
memory = 80_000_000_000

[links]
default = { latency = "50 ms", bandwidth = "100 Mbit/s" }
intra = { latency = "0.5 ms", bandwidth = "1 Gbit/s" }

[[link]]
from = "office"
to = "cloud"
latency = "20 ms"
bandwidth = "300 Mbit/s"

[[link]]
from = "gpu-1"
to = "big"
latency = 0.03
bandwidth = 1e6
symmetric = false
"""


def test_every_key() -> None:
    between = Link(0.02, 37.5e6)
    gpus = [
        Device(
            name=f"gpu-{i}",
            region="office",
            flops_per_s=10e9,
            memory_bytes=2**34,
            price_per_hour=1.2,
            hardware="NVIDIA A40",
        )
        for i in (0, 1)
    ]
    assert parse_fleet(FULL, "f.toml") == Fleet(
        name="two-offices",
        description="two offices and a cloud",
        devices=(*gpus, Device(name="big", region="cloud", flops_per_s=2e12, memory_bytes=80_000_000_000)),
        links=Links(
            default=Link(0.05, 12.5e6),
            intra=Link(0.0005, 125e6),
            regions=(Route("office", "cloud", between), Route("cloud", "office", between)),
            devices=(Route("gpu-1", "big", Link(0.03, 1e6)),),
        ),
    )


def test_the_least_that_one_may_write(tmp_path: Path) -> None:
    path = tmp_path / "desk.toml"
    path.write_text('[[device]]\nname = "pc"\ncompute = "1 GFLOPS"\nmemory = "1 GiB"\n')
    fleet = load_fleet(path)
    assert (fleet.name, fleet.names, fleet.regions) == ("desk", ("pc",), ("local",))


def test_a_region_linked_with_itself() -> None:
    text = FULL.replace('to = "cloud"', 'to = "office"', 1).replace('"gpu-1"', '"gpu-0"')
    assert parse_fleet(text, "f.toml").links.regions == (Route("office", "office", Link(0.02, 37.5e6)),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("compute =", "comptue =", "f.toml: [[device]] 1: unknown key 'comptue': did you mean 'compute'?"),
        ("symmetric =", "symetric =", "f.toml: [[link]] 2: unknown key 'symetric': did you mean 'symmetric'?"),
        ("default = { latency", "default = { latncy", "f.toml: [links] default: unknown key 'latncy': did you mean"),
        ("intra =", "inter =", "f.toml: [links]: unknown key 'inter': did you mean 'intra'?"),
        ("[[link]]", "[[lnik]]", "f.toml: top level: unknown key 'lnik': did you mean 'link'?"),
        ('compute = "10 GFLOPS"\n', "", "f.toml: [[device]] 1: missing key 'compute'"),
        (
            '"10 GFLOPS"',
            '"10 GFLPS"',
            "f.toml: [[device]] 1 'gpu': compute: got '10 GFLPS' (there is no unit 'GFLPS'; did",
        ),
        ('"16 GiB"', '"none"', "f.toml: [[device]] 1 'gpu': memory: got 'none', expected a size such as"),
        ('"16 GiB"', '"0 GiB"', "f.toml: [[device]] 1 'gpu': device 'gpu-0': memory_bytes: got 0, expected"),
        ('"20 ms"', "-1", "f.toml: [[link]] 1: latency: got -1 (it must not be negative), expected a duration"),
        ('"100 Mbit/s"', '"0 bps"', "f.toml: [links] default: bandwidth: got '0 bps' (it must be above zero)"),
        ("count = 2", "count = 0", "f.toml: [[device]] 1: count: expected 'integer' >= 1"),
        ("count = 2", "count = 99999999999", "f.toml: [[device]] 1: count: expected 'integer' <= 100000"),
        (
            "count = 2",
            "count = 100000",
            "f.toml: [[device]] 2 'big': count: got 100001 devices so far, expected at most",
        ),
        ("count = 2", 'count = "2"', "f.toml: [[device]] 1: count: expected 'integer | null', got 'text'"),
        (
            'to = "cloud"',
            'to = "clouds"',
            "f.toml: [[link]] 1: to: unknown device or region 'clouds': did you mean 'cloud'",
        ),
        (
            'to = "big"',
            'to = "cloud"',
            "f.toml: [[link]] 2: got 'gpu-1' and 'cloud', expected two devices or two regions",
        ),
        ("count = 2", "count = 2\nscale = 0", "f.toml: [[device]] 1 'gpu': device 'gpu-0': scale: got 0"),
        ("count = 2", "count = 2\nscale = 1e308", "f.toml: [[device]] 1 'gpu': device 'gpu-0': compute times"),
        ("count = 2", 'count = 2\nscale = "half"', "f.toml: [[device]] 1: scale: "),
        (
            "price_per_hour = 1.2",
            "price_per_hour = nan",
            "f.toml: [[device]] 1: price_per_hour: got nan",
        ),
        ("count = 2", "count = = 2", "f.toml: not valid TOML: Invalid value (at line 10, column 9)"),
        ("count = 2", f"count = {'9' * 5000}", "f.toml: not valid TOML: "),
        ("count = 2", f"count = {'[' * 5000}", "f.toml: not valid TOML: "),
        (FULL, "", "f.toml: top level: missing key 'device'"),
        (FULL, "device = []", "f.toml: fleet 'f': got no device, expected at least one"),
        (FULL, "device = [5]", "f.toml: [[device]] 1: got 5, expected a table"),
    ],
)
def test_what_a_slip_is_told(old: str, new: str, message: str) -> None:
    assert old in FULL
    with pytest.raises(UserError) as caught:
        parse_fleet(FULL.replace(old, new, 1), "f.toml")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_names_that_clash_are_told_before_their_links_are() -> None:
    with pytest.raises(UserError, match=r"^f.toml: fleet 'two-offices': 2 devices are named 'gpu-1'"):
        parse_fleet(FULL.replace('name = "big"', 'name = "gpu-1"').replace('to = "big"', 'to = "gpu-0"'), "f.toml")
    with pytest.raises(UserError, match=r"'office' names a device and a region, .* such as 'office-0' for the device"):
        parse_fleet(FULL.replace('"big"', '"office"'), "f.toml")


def test_a_missing_link_is_named() -> None:
    text = FULL.replace('default = { latency = "50 ms", bandwidth = "100 Mbit/s" }', "")
    text = text.replace('bandwidth = "300 Mbit/s"', 'bandwidth = "300 Mbit/s"\nsymmetric = false')
    with pytest.raises(UserError, match=r"^f.toml: fleet 'two-offices': no link from 'big' to 'gpu-0'"):
        parse_fleet(text, "f.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.toml: cannot read the fleet: No such file"):
        load_fleet(tmp_path / "nowhere.toml")
    with pytest.raises(UserError, match="cannot read the fleet: Is a directory"):
        load_fleet(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"name = \xff")
    with pytest.raises(UserError, match=r"binary.toml: cannot read the fleet: not UTF-8 text \(byte 7\)"):
        load_fleet(tmp_path / "binary.toml")


def labels() -> st.SearchStrategy[str]:
    """Quotes, backslashes, signs and letters of every script, and a space inside."""
    printable = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=4)
    return printable | st.builds("{} {}".format, printable, printable) | st.sampled_from(['"""', "\\", "'", "[a]", "#"])


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Fleets with awkward names and figures of every magnitude."""
    link = st.builds(Link, st.floats(0, 1e300), st.floats(0, 1e300, exclude_min=True))
    names = draw(st.lists(labels(), min_size=3, max_size=5, unique=True))
    region, *names = names
    figure = st.floats(0, allow_infinity=False)
    devices = tuple(
        Device(
            name=name,
            region=region,
            flops_per_s=draw(st.floats(1e-300, allow_infinity=False)),
            memory_bytes=draw(st.integers(1, 2**63 - 1)),
            price_per_hour=draw(figure),
            scale=draw(st.sampled_from([1.0, 0.45, 1 / 3])),
            hardware=draw(st.just("") | labels()),
            half_flops_per_s=draw(st.just(0.0) | st.floats(1e-300, allow_infinity=False)),
            host_bytes_per_s=draw(st.just(0.0) | st.floats(1e-300, 1e300)),
        )
        for name in names
    )
    there, back = draw(link), draw(link)
    second = draw(st.sampled_from([there, back]))
    return Fleet(
        name=draw(labels()),
        description=draw(st.just("") | labels()),
        devices=devices,
        links=Links(
            default=draw(link),
            intra=draw(st.none() | link),
            regions=draw(st.sampled_from([(), (Route(region, region, there),)])),
            devices=(Route(names[0], names[1], there), Route(names[1], names[0], second)),
        ),
    )


@given(fleets())
def test_what_is_dumped_loads_back_equal(fleet: Fleet) -> None:
    assert parse_fleet(dump_fleet(fleet), "f.toml") == fleet


def test_a_dump_reads_well() -> None:
    fleet = parse_fleet(FULL, "f.toml")
    text = dump_fleet(fleet)
    assert 'default = { latency = "50 ms", bandwidth = "100 Mbit/s" }' in text
    assert text.count("[[link]]") == 2
    assert text.count("symmetric = false") == 1
    assert parse_fleet(text, "g.toml") == fleet
