"""Fleets with one thing more, less, faster or larger."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, LinkTrace, Region, Route, built_in_names, edits, resolve_fleet

NAMES = st.sampled_from(sorted(built_in_names()))


def of_pairs(*names: str) -> Fleet:
    """Every link is stated by a pair of devices; the n-th has a latency of n ms."""
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=1e9, memory_bytes=1 << 30) for n in names)
    routes = [Route(a, b, Link(0.001 * n, 1e6)) for n, (a, b) in enumerate(itertools.permutations(names, 2), 1)]
    return Fleet(name="pairs", devices=devices, links=Links(devices=tuple(routes)))


@given(NAMES, st.integers(0, 10**6))
def test_a_copy_has_the_links_of_what_it_is_a_copy_of(name: str, seed: int) -> None:
    fleet = resolve_fleet(name).thin(min(6, len(resolve_fleet(name).devices)))
    like = fleet.names[seed % len(fleet.names)]
    if len(fleet.names) < 2:
        return
    larger = edits.with_another_device(fleet, like)
    (copy,) = set(larger.names) - set(fleet.names)
    assert larger.subset(fleet.names) == fleet
    for other in set(fleet.names) - {like}:
        assert larger.link(copy, other) == fleet.link(like, other)
        assert larger.link(other, copy) == fleet.link(other, like)
    assert larger.link(copy, like).bandwidth_bytes_per_s > 0
    assert edits.without(larger, copy) == fleet


def test_a_copy_where_pairs_state_all_links() -> None:
    larger = edits.with_another_device(of_pairs("a", "b", "c"), "b", count=2)
    assert larger.names == ("a", "b", "c", "new-b", "new-b-2")
    assert larger.link("new-b-2", "c") == larger.link("b", "c")
    assert larger.link("new-b", "b") == larger.link("b", "new-b") == larger.link("b", "c"), "the slowest of b's"
    with pytest.raises(UserError, match="no link from"):
        edits.with_another_device(of_pairs("a", "b", "c"), "b", "at-c")


@pytest.mark.parametrize("fleet", [resolve_fleet("three-sites"), of_pairs("a", "b", "c")], ids=lambda fleet: fleet.name)
def test_another_region_is_as_far_from_the_others(fleet: Fleet) -> None:
    region = fleet.regions[1]
    members = fleet.located(region)
    larger = edits.with_another_region(fleet, region)
    assert larger.regions == (*fleet.regions, f"new-{region}") and larger.subset(fleet.names) == fleet
    copies = dict(zip(members, larger.located(f"new-{region}"), strict=True))
    for a, b in itertools.permutations(members, 2):
        assert larger.link(copies[a], copies[b]) == fleet.link(a, b)
    others = set(fleet.names) - set(members)
    for a, b in itertools.product(members, others):
        assert larger.link(copies[a], b) == fleet.link(a, b) and larger.link(b, copies[a]) == fleet.link(b, a)
    slowest = max(fleet.link(members[0], b).transfer_s(edits.PROBED_BYTES) for b in others)
    for a, b in itertools.product(members, copies.values()):
        assert larger.link(a, b).transfer_s(edits.PROBED_BYTES) == slowest


@given(NAMES, st.floats(0.1, 10), st.floats(0.1, 10), st.integers(0, 10**6))
def test_only_links_between_two_places_are_scaled(name: str, bandwidth: float, latency: float, seed: int) -> None:
    fleet = resolve_fleet(name).thin(min(6, len(resolve_fleet(name).devices)))
    places = [(a, b) for a, b in itertools.product(fleet.regions, repeat=2) if a < b or len(fleet.located(a)) > 1]
    places += list(itertools.combinations(fleet.names, 2))
    if not places:
        return
    a, b = places[seed % len(places)]
    found = edits.with_links(fleet, a, b, bandwidth=bandwidth, latency=latency)
    left, right = fleet.located(a), fleet.located(b)
    for x, y in itertools.permutations(fleet.names, 2):
        between = (x in left and y in right) or (x in right and y in left)
        before, after = fleet.link(x, y), found.link(x, y)
        expected = Link(latency * before.latency_s, bandwidth * before.bandwidth_bytes_per_s) if between else before
        assert after.latency_s == expected.latency_s
        if not fleet.region_info:
            assert after.bandwidth_bytes_per_s == expected.bandwidth_bytes_per_s


def test_a_trace_is_scaled_with_its_link() -> None:
    trace = LinkTrace((0.0, 1.0), (0.01, 0.02), (1e6, 2e6))
    found = edits.scaled_link(trace.mean(), bandwidth=2.0, latency=0.5)
    assert found.trace == LinkTrace((0.0, 1.0), (0.005, 0.01), (2e6, 4e6))


def test_uplinks_speeds_and_memory() -> None:
    fleet = of_pairs("a", "b")
    with pytest.raises(UserError, match="limits none"):
        edits.with_uplink(fleet, "at-a", 2.0)
    limited = Fleet(
        name="limited",
        devices=fleet.devices,
        links=fleet.links,
        region_info=(Region(region="at-a", uplink_bytes_per_s=10.0),),
    )
    assert edits.with_uplink(limited, "at-a", 2.0).link("a", "b").bandwidth_bytes_per_s == 20.0
    faster = edits.with_speed(fleet, ["a"], 3.0)
    assert [d.sustained_flops_per_s for d in faster.devices] == [3e9, 1e9]
    smaller = edits.with_memory_scaled(fleet, ["b"], 0.5)
    assert [d.memory_bytes for d in smaller.devices] == [1 << 30, 1 << 29]


def test_something_must_be_left() -> None:
    with pytest.raises(UserError, match="no device would be left"):
        edits.without(resolve_fleet("laptop"), "desk")
    with pytest.raises(UserError, match="the only one"):
        edits.with_another_region(resolve_fleet("laptop"), "desk")
