"""Checks of a client's update before it is added up. Nothing that a peer sent is believed before.

Names, shapes and types are those that the algorithm itself returns when it is tried on a client without data.

Differential privacy of clients: every update is clipped, and Gaussian noise is added to what is combined.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018: the sum of clipped updates over a fixed
number of clients, so that one client moves it by `clip` at most. The unit of privacy is a client: all its samples.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.combinations import refused
from isthmus.errors import DivergedUpdate, IsthmusError, PeerError, UserError, users_code
from isthmus.extensions import import_extra
from isthmus.federated.algorithms import Algorithm, ClientUpdate, Cohort, Combine, Pass, Values
from isthmus.federated.algorithms.algorithm import Wrapping, changes_of
from isthmus.federated.local import Term
from isthmus.federated.resident import is_buffer, numbers_form
from isthmus.protocol.federated_messages import RefusedUpdate
from isthmus.training.finite import is_finite
from isthmus.training.local_privacy import SecretNoise
from isthmus.wire_types import Above

ROUNDING = 2.0**-7  # the relative rounding of a number in bfloat16
LEAST_ROUNDING = 2.0**-44  # the relative rounding of a norm in double precision: the sum of its squares is rounded too


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on every update, wherever its client trains."""

    max_norm: Above | None = None
    """The largest norm of the model's change (L2): of all its values together, but for running means and single numbers
    beside them."""
    clip: bool = False  # Scale a larger update down to the norm, in place of refusing it.


class Form(msgspec.Struct, frozen=True):
    """A value's shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Tensor) -> Form:
        return Form(tuple(value.shape), value.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class _NoData:
    """A client of one sample and one batch, whose loss does not depend on the weights."""

    samples = 1
    steps = 1

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate

    @property
    def learning_rate(self) -> float:
        return self._rate()

    def start(self, model: Tensor) -> Tensor:
        return model.clone()

    def batches(self) -> Iterator[Mapping[str, Tensor]]:
        yield {}

    def gradient(self, weights: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros_like(weights)

    def descend(self, model: Tensor, term: Term | None = None) -> Tensor:
        return torch.zeros_like(model)

    def full_gradient(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)


def first_state(algorithm: Algorithm, model: Tensor) -> Values | None:
    """Return a client's first state; None where it keeps nothing."""
    with users_code("algorithm: init_client"):
        first = algorithm.init_client(model)
        return None if first is None else named_tensors(first, "init_client")


def forms_of(algorithm: Algorithm, server: Values) -> list[dict[str, Form]]:
    """Return the forms of the values that clients return, by pass; `server` are the server's first values.

    A pass that looks into its batches cannot be tried so: of it, every value must be as large as the model.
    """
    known = {name: value for name, value in server.items() if not is_buffer(name)}
    broadcast, state = algorithm.broadcast(known), first_state(algorithm, server["model"])
    found: list[dict[str, Form]] = []
    for one in algorithm.passes:
        forms = tried(one, broadcast, state) or {name: Form.of(server["model"]) for name in one.returns}
        buffers = {name: value for name, value in server.items() if is_buffer(name)}
        forms |= {name: Form(numbers_form(value), torch.float64) for name, value in buffers.items()}
        found.append(forms)
    return found


def tried(
    one: Pass, broadcast: Values, state: Values | None, rate: Callable[[], float] = lambda: 1.0
) -> dict[str, Form] | None:
    """The forms of what a client without data returns, whose learning rate is `rate`; None where it cannot be tried."""
    try:
        update = one.client(_NoData(rate), broadcast, state)
    except IsthmusError:
        raise
    except Exception:  # the user's own code, given a batch without columns
        return None
    return {name: Form.of(value) for name, value in checked(update).values.items()}


def named_tensors(values: Values, by: str) -> Values:
    """Check the result of the algorithm's function `by`, which may be the user's. UserError for no tensors by name."""
    for name, value in named(values, by).items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"algorithm: {by} gives {name!r}: got {type(value).__name__}, expected a tensor")
        if value.layout is not torch.strided or value.is_complex():
            got = value.dtype if value.is_complex() else value.layout
            raise UserError(f"algorithm: {by} gives {name!r}: got {got}, expected plain numbers, strided")
    return values


def named(values: Values, by: str) -> Values:
    """UserError for no dict."""
    if not isinstance(values, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"algorithm: {by} gives {type(values).__name__}, expected a dict of tensors")
    return values


@contextlib.contextmanager
def unwritten(values: Values, by: str, how: str, expected: str) -> Generator[None]:
    """UserError where the algorithm's function `by` wrote to what it `received` or `was given`: others read it too."""
    before = [value._version for value in values.values()]
    yield
    for version, (name, value) in zip(before, values.items(), strict=True):
        if value._version != version:
            raise UserError(f"algorithm: {by} changed {name!r} of what it {how}, expected {expected}")


def checked(update: ClientUpdate) -> ClientUpdate:
    """Check a client's result. UserError for what is no update."""
    if not isinstance(update, ClientUpdate):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"algorithm: a client returned {type(update).__name__}, expected a ClientUpdate")
    named_tensors(update.values, "a client")
    if update.state is not None and not callable(update.state):
        named(update.state, "a client, as its state,")
    if not isinstance(update.weight, int | float | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"algorithm: weight of an update: got {type(update.weight).__name__}, expected a number")
    return update


def admit(
    update: ClientUpdate,
    forms: Mapping[str, Form],
    rules: AdmissionRules,
    change_of: Callable[[Values], Values] = changes_of,
) -> ClientUpdate:
    """The update, clipped where the rules say so. PeerError, which does not name the sender, for one that is refused.

    That its weight is one of the cohort is seen when it is folded in.
    """
    for name in sorted(forms.keys() | update.values.keys()):
        if name not in update.values:
            if is_buffer(name):
                continue  # training did not change it
            raise PeerError(f"sent no value {name!r}")
        if name not in forms:
            raise PeerError(f"sent a value {reprlib.repr(name)}, expected {', '.join(sorted(forms))}")
        if (got := Form.of(update.values[name])) != forms[name]:
            raise PeerError(f"value {name!r}: got {got}, expected {forms[name]}")
    check_finite(update)
    return bounded(update, rules, change_of)


def check_finite(update: ClientUpdate) -> None:
    """DivergedUpdate for one that is not."""
    for name, value in update.values.items():
        if not is_finite(value):
            raise DivergedUpdate(f"value {name!r}: not all numbers are finite")


def check_largest(update: ClientUpdate, largest: Mapping[str, float], steps: int) -> None:
    """PeerError for numbers that no client of so many steps returns."""
    for name, most in largest.items():
        got = float(update.values[name].abs().max()) if name in update.values else 0.0
        if got > most * (1 + ROUNDING):
            raise PeerError(f"value {name!r}: got {got:g}, expected at most {most:g} of a client of {steps} steps")


def refusal_of(client: int, error: PeerError) -> RefusedUpdate:
    return RefusedUpdate(client, str(error), isinstance(error, DivergedUpdate))


def bounded(
    update: ClientUpdate, rules: AdmissionRules, change_of: Callable[[Values], Values] = changes_of
) -> ClientUpdate:
    """The update within `max_norm`; PeerError for a larger one that is not to be clipped. `change_of` is the
    algorithm's `change`. A clipped update is within the norm whatever its numbers were rounded to, so that clipping
    it again changes nothing."""
    if rules.max_norm is None:
        return update
    with users_code("algorithm: change"):
        change = change_of({name: value for name, value in update.values.items() if not is_buffer(name)})
    norm = _norm([*change.values()])
    if norm <= rules.max_norm:
        return update
    if not rules.clip or not math.isfinite(norm):
        kind = PeerError if math.isfinite(norm) else DivergedUpdate
        raise kind(f"an update of norm {norm:.4g}, expected at most {rules.max_norm:g}")
    roundings = (torch.finfo(v.dtype).eps for v in change.values() if v.is_floating_point())
    scale = rules.max_norm / norm * (1 - max(LEAST_ROUNDING, *roundings))
    clipped = {name: update.values[name] * scale for name in change}
    return ClientUpdate(values={**update.values, **clipped}, state=update.state, weight=update.weight)


def _norm(values: Sequence[Tensor]) -> float:
    """L2, of all together, in double precision."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(v.double())) ** 2 for v in values))


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
