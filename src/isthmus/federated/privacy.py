"""Differential privacy of clients: every update is clipped, and Gaussian noise is added to what is combined.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018: the sum of clipped updates over a fixed
number of clients, so that one client moves it by `clip` at most. The unit of privacy is a client: all its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import Algorithm, Cohort, Combine, Values
from isthmus.federated.algorithms.algorithm import Wrapping
from isthmus.federated.buffers import is_buffer
from isthmus.training.local_privacy import SecretNoise
from isthmus.wire_types import Above

GRID = 1e-4  # the accountant's own. Whatever it is, its epsilon is no smaller than the true one.


class Privacy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How updates are clipped and covered."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "epsilon": ": epsilon follows from privacy.noise_multiplier and rounds: `isthmus train JOB --dry-run` shows it"
    }
    clip: Above  # The norm that no update exceeds, all its values together.
    noise_multiplier: Above  # The noise's deviation in units of `clip`, on the sum.
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5  # The delta of (epsilon, delta) differential privacy.
    noise: Literal["server", "sites"] = "server"
    """The noise is added by the server to the sum, or with federated.aggregation.secure by each site, a share of it, so
    that nobody sees a sum without noise."""

    @property
    def bounds(self) -> AdmissionRules:
        return AdmissionRules(max_norm=self.clip, clip=True)


class Private(Wrapping, frozen=True):
    """The algorithm, given noisy means of equal weights. The noise is not reproducible: a seed that others know would
    give it away."""

    privacy: Privacy
    expected: int  # clients per round: what sums are divided by, however many came
    noisy: bool = True  # whether the server adds noise: else it is in the updates
    minimum: int = 0
    """Sites, in a simulation, that add noise: so many make the deviation, and more have more. 0: the server adds it."""

    @property
    def adds_noise(self) -> bool:
        return self.privacy.noise == "server"

    def operations(self, returns: Mapping[str, Combine]) -> Mapping[str, Combine]:
        for name, combine in returns.items():
            if combine == "collect":
                raise refused("collected values", "client privacy", f"one that collects {name!r} of every client")
        return dict.fromkeys(returns, "sum")

    def change(self, values: Values) -> Values:
        """All of them: what a norm leaves out, noise does not cover."""
        return {name: value for name, value in values.items() if not is_buffer(name)}

    def counted(self, cohort: Cohort) -> Cohort:
        """Return a cohort of the expected number, as the means are. The number of those who came depends on each of
        them: what is made of noisy sums and of that number is not private."""
        return Cohort(clients=self.expected, population=cohort.population)

    def changed(self, returns: Mapping[str, Combine], combined: Values, cohort: Cohort) -> Values:
        deviation = self.privacy.noise_multiplier * self.privacy.clip
        if self.minimum:
            deviation *= math.sqrt(cohort.clients / self.minimum)
        noise, noisy = SecretNoise(), combined
        if self.noisy:
            noisy = {name: v + (deviation * noise.normal(v.shape)).to(v.dtype) for name, v in combined.items()}
        return {name: v if returns[name] == "sum" else v / self.expected for name, v in noisy.items()}


def private(inner: Algorithm, privacy: Privacy, expected: int, minimum: int, *, simulated: bool) -> Private:
    """The server's side of a job; `minimum` updates make a sum."""
    if privacy.noise == "server":
        return Private(inner=inner, privacy=privacy, expected=expected)
    return Private(inner=inner, privacy=privacy, expected=expected, noisy=simulated, minimum=minimum)


class Guarantee(msgspec.Struct, frozen=True, kw_only=True):
    """The promise of a run to every client: (epsilon, delta)-differential privacy, had its updates been zeros."""

    epsilon: float
    delta: float
    rounds: int
    sampling_probability: float | None  # None: not counted on, as clients are not drawn each by itself
    unsampled: int = 0
    """Rounds that count once more, with every client in them: those that a resumed run made a second time, and those
    that did not wait for all who were drawn."""

    def __str__(self) -> str:
        drawn = "" if self.sampling_probability is None else f", drawn with probability {self.sampling_probability:.3g}"
        twice = f"; {self.unsampled} of them count twice" if self.unsampled else ""
        spent = f"epsilon {self.epsilon:.3g} at delta {self.delta:g} after {self.rounds} rounds"
        return f"{spent}, for all data of each client{drawn}{twice}"


def guarantee(privacy: Privacy, rounds: int, passes: int, probability: float | None, unsampled: int = 0) -> Guarantee:
    """Compute the guarantee by the privacy loss distributions of Google's dp-accounting; where noise is so small that
    it has no number for them, by concentrated privacy, which is never smaller. UserError where that library is not
    installed, and for noise so small that epsilon is no finite number.

    `probability` is that of each client to take part in a round, drawn by itself; passes of a round share the draw.
    """
    dp = import_extra("dp_accounting", "[privacy]")
    pld = import_extra("dp_accounting.pld", "[privacy]")
    deviation = privacy.noise_multiplier / math.sqrt(passes)
    everyone = dp.GaussianDpEvent(deviation)
    drawn = everyone if probability is None or probability >= 1 else dp.PoissonSampledDpEvent(probability, everyone)
    try:
        # Losses are of size 1 / deviation^2: a finer grid than in proportion to them takes hours where noise is small.
        accountant = pld.PLDAccountant(value_discretization_interval=GRID * max(1.0, deviation**-2))
        accountant.compose(drawn, rounds)
        if unsampled:
            accountant.compose(everyone, unsampled)
        epsilon = float(accountant.get_epsilon(privacy.delta))
    except OverflowError:
        epsilon = _concentrated_epsilon(privacy, (rounds + unsampled) * passes)
    return Guarantee(
        epsilon=epsilon,
        delta=privacy.delta,
        rounds=rounds,
        sampling_probability=probability,
        unsampled=unsampled,
    )


def _concentrated_epsilon(privacy: Privacy, releases: int) -> float:
    """rho + 2 sqrt(rho ln(1 / delta)) (Bun and Steinke 2016): of so many sums with noise. That clients are drawn is not
    counted on."""
    rho = releases / 2 / privacy.noise_multiplier / privacy.noise_multiplier
    epsilon = rho + 2 * math.sqrt(rho * -math.log(privacy.delta))
    if not math.isfinite(epsilon):
        what = f"got {privacy.noise_multiplier:g}, for which epsilon is no finite number"
        raise UserError(f"privacy.noise_multiplier: {what}: expected more noise")
    return epsilon
