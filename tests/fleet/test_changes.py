"""A fleet whose figures are corrected, or change along a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet import FleetChange, built_in_names, changed, corrected, resolve_fleet


@given(st.sampled_from(built_in_names()), st.floats(0.01, 100), st.floats(0.01, 100), st.integers(0, 5))
def test_only_what_is_named_changes(name: str, slow: float, drop: float, step: int) -> None:
    fleet = resolve_fleet(name)
    fleet = fleet.thin(min(5, len(fleet.names)))
    if len(fleet.names) < 2:
        return
    a, b = fleet.names[:2]
    changes = (FleetChange(step=3, factor=slow, device=a), FleetChange(step=3, factor=drop, link=(a, b)))
    found = changed(fleet, changes, step)
    since = step >= 3
    speed = fleet.device(a).sustained_flops_per_s * (slow if since else 1.0)
    assert found.device(a).sustained_flops_per_s == pytest.approx(speed)
    stated, now = fleet.link(a, b), found.link(a, b)
    if not fleet.region_info:  # a site's uplink bounds whatever is said of a link
        assert now.bandwidth_bytes_per_s == pytest.approx(stated.bandwidth_bytes_per_s * (drop if since else 1.0))
    assert now.latency_s == stated.latency_s
    for x in fleet.names:
        assert x == a or found.device(x) == fleet.device(x)
        for y in fleet.names:
            assert x == y or (x, y) == (a, b) or found.link(x, y) == fleet.link(x, y)


def test_of_several_changes_the_latest_counts() -> None:
    fleet = resolve_fleet("three-sites").thin(3)
    name = fleet.names[0]
    changes = (FleetChange(step=9, factor=1.0, device=name), FleetChange(step=2, factor=0.5, device=name))
    speeds = [changed(fleet, changes, step).device(name).sustained_flops_per_s for step in (1, 2, 8, 9)]
    stated = fleet.device(name).sustained_flops_per_s
    assert speeds == [stated, stated / 2, stated / 2, stated]


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 1, "factor": 0.5},
        {"step": 1, "factor": 0.5, "device": "a", "link": ("a", "b")},
        {"step": -1, "factor": 0.5, "device": "a"},
        {"step": 1, "factor": -1.0, "device": "a"},
    ],
)
def test_what_is_no_change_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        FleetChange(**fields)  # type: ignore[arg-type]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="nobody"):
        corrected(resolve_fleet("laptop").thin(2), {"nobody": 1.0}, {})
