"""Differential privacy of clients: every update is clipped, and Gaussian noise is added to what is combined.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018: the sum of clipped updates over a fixed
number of clients, so that one client moves it by `clip` at most. The unit of privacy is a client: all its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import Algorithm, Cohort, Combine, Values
from isthmus.federated.algorithms.algorithm import Wrapping
from isthmus.training.local_privacy import SecretNoise

GRID = 1e-4
"""The accountant's own. Whatever it is, its epsilon is no smaller than the true one."""


class Privacy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How updates are clipped and covered."""

    clip: Annotated[float, Meta(gt=0)]
    """The norm that no update exceeds, all its values together."""
    noise_multiplier: Annotated[float, Meta(gt=0)]
    """The noise's deviation in units of `clip`, on the sum."""
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    """Of (epsilon, delta) differential privacy."""
    noise: Literal["server", "sites"] = "server"
    """Who adds it: the server to the sum, or with aggregation.secure each site its share, so that nobody sees a sum
    without noise."""

    @property
    def bounds(self) -> AdmissionRules:
        """Of every update."""
        return AdmissionRules(max_norm=self.clip, clip=True)


class Private(Wrapping, frozen=True):
    """The algorithm, given noisy means of equal weights. The noise is not reproducible: a seed that others know would
    give it away."""

    privacy: Privacy
    expected: float
    """Clients per round: what sums are divided by, however many came."""
    noisy: bool = True
    """Whether the server adds noise: else it is in the updates."""
    minimum: int = 0
    """Of simulated sites that add noise: so many make the deviation, and more have more. 0: the server adds it."""

    def operations(self, returns: Mapping[str, Combine]) -> Mapping[str, Combine]:
        for name, combine in returns.items():
            if combine == "collect":
                raise UserError(f"privacy: the algorithm collects {name!r} of every client, expected means and sums")
        return dict.fromkeys(returns, "sum")

    def changed(self, returns: Mapping[str, Combine], combined: Values, cohort: Cohort) -> Values:
        deviation = self.privacy.noise_multiplier * self.privacy.clip
        if self.minimum:
            deviation *= math.sqrt(cohort.clients / self.minimum)
        noise, noisy = SecretNoise(), combined
        if self.noisy:
            noisy = {name: v + (deviation * noise.normal(v.shape)).to(v.dtype) for name, v in combined.items()}
        return {name: v if returns[name] == "sum" else v / self.expected for name, v in noisy.items()}


def private(inner: Algorithm, privacy: Privacy, expected: float, minimum: int, *, simulated: bool) -> Private:
    """The server's side of a job; `minimum` updates make a sum."""
    if privacy.noise == "server":
        return Private(inner=inner, privacy=privacy, expected=expected)
    return Private(inner=inner, privacy=privacy, expected=expected, noisy=simulated, minimum=minimum)


class Guarantee(msgspec.Struct, frozen=True, kw_only=True):
    """What a run promises every client: (epsilon, delta)-differential privacy, had the data one client more or less."""

    epsilon: float
    delta: float
    rounds: int
    sampling_probability: float | None
    """None: not counted on, as clients are not drawn each by itself."""

    def __str__(self) -> str:
        drawn = "" if self.sampling_probability is None else f", drawn with probability {self.sampling_probability:.3g}"
        return f"epsilon {self.epsilon:.3g} at delta {self.delta:g} after {self.rounds} rounds{drawn}"


def guarantee(privacy: Privacy, rounds: int, passes: int, probability: float | None) -> Guarantee:
    """By the privacy loss distributions of Google's dp-accounting. UserError where that is not installed.

    `probability` is that of each client to take part in a round, drawn by itself; passes of a round share the draw.
    """
    dp = import_extra("dp_accounting", "[federated.privacy]")
    pld = import_extra("dp_accounting.pld", "[federated.privacy]")
    deviation = privacy.noise_multiplier / math.sqrt(passes)
    event = dp.GaussianDpEvent(deviation)
    if probability is not None and probability < 1:
        event = dp.PoissonSampledDpEvent(probability, event)
    # Losses are of size 1 / deviation^2: a finer grid than in proportion to them takes hours where noise is small.
    accountant = pld.PLDAccountant(value_discretization_interval=GRID * max(1.0, deviation**-2))
    accountant.compose(event, rounds)
    return Guarantee(
        epsilon=float(accountant.get_epsilon(privacy.delta)),
        delta=privacy.delta,
        rounds=rounds,
        sampling_probability=probability,
    )
