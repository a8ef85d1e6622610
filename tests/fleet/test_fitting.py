"""A link's two figures from timed messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.fleet.fleet import LEAST_LATENCY_S, MOST_BANDWIDTH, fit_link

SIZES = (1 << 8, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)


@given(st.floats(1e-5, 1.0), st.floats(1e4, 1e10), st.integers(2, len(SIZES)))
def test_exact_times_give_the_link_back(latency_s: float, bandwidth: float, count: int) -> None:
    times = [(size, 2 * latency_s + size / bandwidth) for size in SIZES[-count:]]
    found = fit_link(times)
    slowest_s = times[-1][1]
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6 * slowest_s * bandwidth / SIZES[-1])
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6 * slowest_s / latency_s)


def test_one_late_message_of_each_size_changes_nothing() -> None:
    times = [(size, 0.02 + size / 1e7) for size in SIZES for _ in range(4)]
    late = [(size, 9.0) for size in SIZES]
    assert fit_link([*times, *late]) == fit_link(times)


def test_a_machine_that_is_busy_for_most_of_a_probe_changes_little() -> None:
    """Three of five trips are late, by up to twice the whole trip."""
    times = [(size, (0.02 + size / 1e7) * late) for size in SIZES for late in (1.0, 1.01, 1.5, 2.0, 3.0)]
    found = fit_link(times)
    assert found.latency_s == pytest.approx(0.01, rel=0.02)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e7, rel=0.02)


def test_noise_of_five_per_cent_stays_within_ten() -> None:
    wobble = (0.95, 1.03, 1.05, 0.97, 1.0, 1.04)
    found = fit_link([(size, (0.02 + size / 1e7) * w) for size, w in zip(SIZES, wobble, strict=True)])
    assert found.latency_s == pytest.approx(0.01, rel=0.1)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e7, rel=0.1)


def test_figures_stay_within_reason() -> None:
    found = fit_link([(size, 1e-4) for size in SIZES])
    assert found.bandwidth_bytes_per_s == MOST_BANDWIDTH
    assert fit_link([(1, 1.0), (2, 2.0)]).latency_s == LEAST_LATENCY_S
    with pytest.raises(UserError, match="times of 1 sizes, expected two or more"):
        fit_link([(1, 1.0), (1, 2.0)])
