"""Devices and links: who overrides whom, what is refused, thinning, averaging both directions."""

from __future__ import annotations

import math
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Route

DEFAULT, INTRA, REGION, DEVICE = (Link(latency_s, 1e6) for latency_s in (0.4, 0.3, 0.2, 0.1))


def device(name: str, region: str = "here") -> Device:
    return Device(name=name, region=region, flops_per_s=1e9, memory_bytes=2**30)


def fleet_of(regions: str, links: Links) -> Fleet:
    """One device for each letter, in the region of that letter: "aab" is a0 and a1 in A, b2 in B."""
    devices = tuple(device(f"{letter}{i}", letter.upper()) for i, letter in enumerate(regions))
    return Fleet(name="test", devices=devices, links=links)


def test_transfer_is_latency_plus_size_over_bandwidth() -> None:
    assert Link(0.05, 1e6).transfer_s(2e6) == 2.05
    assert Link(0.05, 1e6).transfer_s(0) == 0.05


def test_the_particular_overrides_the_general() -> None:
    links = Links(
        default=DEFAULT,
        intra=INTRA,
        regions=(Route("A", "B", REGION), Route("B", "B", REGION)),
        devices=(Route("a0", "b2", DEVICE),),
    )
    fleet = fleet_of("aabbc", links)
    assert fleet.link("a0", "b2") == DEVICE
    assert fleet.link("a1", "b2") == REGION
    assert fleet.link("b2", "b3") == REGION  # a region paired with itself overrides intra
    assert fleet.link("a0", "a1") == INTRA
    assert fleet.link("a0", "c4") == DEFAULT


def test_links_are_directed() -> None:
    fleet = fleet_of("ab", Links(regions=(Route("A", "B", REGION), Route("B", "A", DEVICE))))
    assert fleet.link("a0", "b1") == REGION
    assert fleet.link("b1", "a0") == DEVICE


@pytest.mark.parametrize(
    ("links", "pair"),
    [
        (Links(regions=(Route("A", "B", REGION),), intra=INTRA), "from 'b2' to 'a0'"),
        (Links(regions=(Route("A", "B", REGION), Route("B", "A", REGION))), "from 'a0' to 'a1'"),
        (Links(), "from 'a0' to 'a1'"),
    ],
)
def test_a_pair_without_a_link_is_named(links: Links, pair: str) -> None:
    with pytest.raises(UserError, match=f"no link {pair}"):
        fleet_of("aab", links)


def test_pairs_of_devices_may_be_all_there_is() -> None:
    names = ["a0", "a1", "b2"]
    routes = tuple(Route(a, b, DEVICE) for a, b in permutations(names, 2))
    assert fleet_of("aab", Links(devices=routes)).link("b2", "a1") == DEVICE
    with pytest.raises(UserError, match="no link from 'b2' to 'a1'"):
        fleet_of("aab", Links(devices=routes[:-1]))


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        ((), Links(), "at least one"),
        ((device("x"), device("x")), Links(default=DEFAULT), "2 devices are named 'x'"),
        ((device("x"), device("here")), Links(default=DEFAULT), "'here' names a device and a region"),
        (
            (device("alpha"), device("beta")),
            Links(default=DEFAULT, devices=(Route("alhpa", "beta", DEVICE),)),
            "'alpha'",
        ),
        ((device("x"),), Links(regions=(Route("here", "there", REGION),)), "unknown region"),
        ((device("x"),), Links(devices=(Route("x", "x", DEVICE),)), "to itself"),
        ((device("x"),), Links(regions=(Route("here", "here", REGION),) * 2), "two links from region 'here'"),
    ],
)
def test_what_a_fleet_refuses(devices: tuple[Device, ...], links: Links, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Fleet(name="test", devices=devices, links=links)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "two\nlines"},
        {"region": " "},
        {"flops_per_s": 0.0},
        {"flops_per_s": math.nan},
        {"memory_bytes": 0},
        {"price_per_hour": -1.0},
        {"price_per_hour": math.inf},
    ],
)
def test_what_a_device_refuses(changes: dict[str, object]) -> None:
    (field,) = changes
    with pytest.raises(UserError, match=f"{field.replace('name', 'device name')}: got "):
        msgspec.structs.replace(device("x"), **changes)


@pytest.mark.parametrize("numbers", [(-0.1, 1e6), (math.nan, 1e6), (0.1, 0.0), (0.1, math.inf)])
def test_what_a_link_refuses(numbers: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"link: .*: got "):
        Link(*numbers)


def test_look_ups_offer_the_nearest_name() -> None:
    fleet = fleet_of("aab", Links(default=DEFAULT))
    assert fleet.device("b2").region == "B"
    assert (fleet.names, fleet.regions) == (("a0", "a1", "b2"), ("A", "B"))
    with pytest.raises(UserError, match="unknown device 'b22': did you mean 'b2'"):
        fleet.device("b22")
    with pytest.raises(UserError, match="unknown device 'zz'"):
        fleet.link("a0", "zz")
    with pytest.raises(UserError, match="'a0' to itself"):
        fleet.link("a0", "a0")


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (1, ("a0",)),
        (2, ("a0", "b1")),
        (3, ("a0", "b1", "c3")),
        (4, ("a0", "b1", "b2", "c3")),
        (5, ("a0", "b1", "b2", "c3", "c4")),
        (6, ("a0", "b1", "b2", "c3", "c4", "b5")),
    ],
)
def test_thinning_takes_one_of_each_region_in_turn(count: int, kept: tuple[str, ...]) -> None:
    assert fleet_of("abbccb", Links(default=DEFAULT)).thin(count).names == kept


def test_thinning_keeps_the_links_of_those_who_stay() -> None:
    links = Links(
        default=DEFAULT,
        regions=(Route("A", "B", REGION), Route("A", "C", REGION)),
        devices=(Route("a0", "b2", DEVICE), Route("a1", "b2", INTRA)),
    )
    thin = fleet_of("aabc", links).thin(2)
    assert thin.links == Links(default=DEFAULT, regions=links.regions[:1], devices=links.devices[:1])
    assert thin.link("a0", "b2") == DEVICE


@pytest.mark.parametrize("count", [0, -1, 4])
def test_thinning_to_what_is_not_there_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"got {count} devices to keep, expected 1 to 3"):
        fleet_of("aab", Links(default=DEFAULT)).thin(count)


def test_json_round_trip() -> None:
    links = Links(default=DEFAULT, regions=(Route("A", "B", REGION),), devices=(Route("a0", "b1", DEVICE),))
    fleet = fleet_of("ab", links)
    assert fleet.link("a0", "b1") == DEVICE  # what look-ups keep at hand must not reach the JSON
    data = msgspec.json.encode(fleet)
    assert msgspec.json.decode(data, type=Fleet) == fleet
    assert b"_routes" not in data
    with pytest.raises(UserError, match="no link"):
        msgspec.json.decode(
            data.replace(b'"default":{"latency_s":0.4,"bandwidth_bytes_per_s":1000000.0},', b""), type=Fleet
        )


def test_a_thousand_devices_in_eight_regions_stay_small() -> None:
    regions = [chr(ord("A") + i) for i in range(8)]
    routes = tuple(Route(a, b, REGION) for a, b in permutations(regions, 2))
    fleet = fleet_of("abcdefgh" * 125, Links(intra=INTRA, regions=routes))
    assert fleet.link("a0", "h999") == REGION
    assert fleet.link("a0", "a992") == INTRA
    assert len(msgspec.json.encode(fleet.links)) < 10_000


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Small fleets with any mix of stated links over a default."""
    link = st.builds(Link, st.floats(0, 1), st.floats(1, 1e9))
    regions = draw(st.text("abc", min_size=1, max_size=6))
    names = [f"{letter}{i}" for i, letter in enumerate(regions)]
    upper = sorted(set(regions.upper()))
    region_pairs = draw(st.sets(st.tuples(st.sampled_from(upper), st.sampled_from(upper))))
    device_pairs = draw(
        st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda p: p[0] != p[1]))
    )
    links = Links(
        default=draw(link),
        intra=draw(st.none() | link),
        regions=tuple(Route(*pair, draw(link)) for pair in sorted(region_pairs)),
        devices=tuple(Route(*pair, draw(link)) for pair in sorted(device_pairs)),
    )
    return fleet_of(regions, links)


@given(fleets(), st.data())
def test_thinning_changes_no_link(fleet: Fleet, data: st.DataObject) -> None:
    thin = fleet.thin(data.draw(st.integers(1, len(fleet.devices))))
    for a, b in permutations(thin.names, 2):
        assert thin.link(a, b) == fleet.link(a, b)
