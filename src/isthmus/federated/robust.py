"""Means that a few wrong or hostile updates do not move far, over whatever algorithm: every update is collected.

`median` and `trimmed_mean`: Yin et al., Byzantine-Robust Distributed Learning, 2018, each coordinate by itself.
`krum`: Blanchard et al., Machine Learning with Adversaries, 2017; with `keep` above 1, their Multi-Krum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.errors import UserError
from isthmus.federated.algorithms import Cohort, Combine, Values
from isthmus.federated.algorithms.algorithm import Wrapping
from isthmus.units import exact, parse_duration
from isthmus.wire_types import MOST_CLIENTS, Client, Text


class Aggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How updates are combined, and whether the coordinator sees them. With a rule in place of the algorithm's means
    and sums, weights do not count: anybody could say any."""

    rule: Literal["declared", "median", "trimmed_mean", "krum"] = "declared"
    """`declared`: what the algorithm itself says."""
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = 0.1
    """Trimmed mean: the share cut off at either end. It takes 1 / trim updates to cut off one; 0 cuts off none."""
    byzantine: Client = 1  # Krum: so many updates may be hostile.
    keep: Annotated[int, Meta(ge=1, le=MOST_CLIENTS)] = 1  # Krum: the mean of so many updates.
    secure: bool = False
    """Sites mask their updates, so that the coordinator sees the sum only. Simulated clients have the same bits without
    masks."""
    most_samples: Annotated[int, Meta(ge=1, lt=1 << 40)] | None = None
    """The most samples of a site. It fixes the scale of the sums, so that no site says how many samples it has."""
    threshold: Annotated[float, Meta(ge=0.5, lt=1)] = 0.5
    """With `secure`: more than this share of a site's neighbours must stay to take the masks off."""
    wait: Text = "10 s"  # With `secure`: for sites that do not answer, in each step of the key exchange.

    @property
    def wait_s(self) -> float:
        return parse_duration(self.wait, "federated.aggregation.wait")

    @property
    def described(self) -> str:
        options = {
            "krum": f" with byzantine = {self.byzantine}, keep = {self.keep}",
            "trimmed_mean": f" with trim = {self.trim:g}",
        }
        return self.rule + options.get(self.rule, "")

    @property
    def fewest(self) -> int:
        """Updates without which the rule says nothing."""
        if self.rule == "krum":
            return max(2 * self.byzantine + 3, self.keep)
        if self.rule == "trimmed_mean" and self.trim:
            return math.ceil(1 / exact(self.trim))  # of fewer, nothing is cut off
        return 1


class Robust(Wrapping, frozen=True):
    """The algorithm with a robust mean in place of its own."""

    rule: Aggregation

    def operations(self, returns: Mapping[str, Combine]) -> Mapping[str, Combine]:
        return dict.fromkeys(returns, "collect")

    def changed(self, returns: Mapping[str, Combine], combined: Values, cohort: Cohort) -> Values:
        averaged = [name for name, combine in returns.items() if combine != "collect"]
        if cohort.clients < self.rule.fewest:
            what = f"aggregation: {self.rule.rule} of {cohort.clients} updates, expected {self.rule.fewest} or more"
            raise UserError(f"{what} for {self.rule.described}")
        found = dict(combined)
        for name in averaged:
            # Each by itself: distances between all values together would be those of the largest (FedNova's steps).
            found |= robust_mean(self.rule, {name: combined[name]})
            if returns[name] == "sum":
                found[name] = found[name] * cohort.clients
        return found


def _fractional(rows: Tensor) -> Tensor:
    return rows if rows.is_floating_point() else rows.double()  # counts, say: their mean is none


def robust_mean(rule: Aggregation, collected: Values) -> Values:
    """[clients, ...] by name -> [...] by name."""
    collected = {name: _fractional(rows) for name, rows in collected.items()}
    match rule.rule:
        case "median":
            return {name: _trimmed(rows, (len(rows) - 1) // 2) for name, rows in collected.items()}
        case "trimmed_mean":
            return {name: _trimmed(rows, math.floor(exact(rule.trim) * len(rows))) for name, rows in collected.items()}
        case "krum":
            chosen = _krum(torch.cat([rows.flatten(1) for rows in collected.values()], 1), rule)
            return {name: rows[chosen].mean(0) for name, rows in collected.items()}
        case "declared":
            raise AssertionError("then nothing is wrapped")


def _trimmed(rows: Tensor, cut: int) -> Tensor:
    """The mean of what is left when `cut` are cut off at either end, coordinate by coordinate; of an even number of
    rows the median is the mean of the middle two."""
    return rows.sort(0).values[cut : len(rows) - cut].mean(0)


def _krum(rows: Tensor, rule: Aggregation) -> Tensor:
    """The rows whose n - f - 2 nearest are nearest, best first; [keep]."""
    distances = torch.cdist(rows.double(), rows.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(1).values[:, 1 : len(rows) - rule.byzantine - 1]
    return nearest.sum(1).argsort(stable=True)[: rule.keep]
