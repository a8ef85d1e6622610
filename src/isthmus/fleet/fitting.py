"""A link's latency and bandwidth from timed messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.errors import UserError
from isthmus.fleet.links import Link

LEAST_LATENCY_S = 1e-6
MOST_BANDWIDTH = 1e12
"""Bytes per second: what cannot be distinguished from no time at all."""


def fit_link(times: Sequence[tuple[int, float]]) -> Link:
    """The link of FusionLLM's T(M) = alpha + beta M, from round trips (size_bytes there and next to nothing back,
    seconds): those take 2 alpha + beta M, if both directions have the same latency.

    Of each size the lower quartile counts: what else a machine or a line does makes a trip longer, never shorter. Sizes
    are weighted by 1 / T, so that small ones tell the latency and large ones the bandwidth.
    UserError for fewer than two sizes.
    """
    by_size: dict[int, list[float]] = {}
    for size_bytes, seconds in times:
        by_size.setdefault(size_bytes, []).append(seconds)
    if len(by_size) < 2:
        raise UserError(f"link probe: got times of {len(by_size)} sizes, expected two or more")
    sizes = np.array(sorted(by_size), dtype=np.float64)
    usual_s = np.array([float(np.quantile(by_size[int(size)], 0.25)) for size in sizes])
    columns = np.stack([np.ones_like(sizes), sizes], axis=1)
    (intercept_s, slope), *_ = np.linalg.lstsq(columns / usual_s[:, None], np.ones_like(usual_s), rcond=None)
    return Link(max(float(intercept_s) / 2, LEAST_LATENCY_S), min(1 / max(float(slope), 1e-30), MOST_BANDWIDTH))
