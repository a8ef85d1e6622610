"""Values that leave a data holder: what they must be before, clipped per sample and covered with Gaussian noise, and
the record of what a run disclosed of its samples (`privacy.json`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.errors import UserError
from isthmus.reading import read_json

LEAST, MOST = 1e-12, 1e9  # range of values that float64 and the accountant can hold
Above = Annotated[float, Meta(gt=0)]


class ActivationNoise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises UserError where not exactly one clip and one measure of noise is given."""

    clip: Above | None = None  # The L2 norm that no sample's values exceed, all that leave together.
    clip_rms: Above | None = None  # The same in proportion to the boundary: their root mean square.
    noise_multiplier: Above | None = None  # The noise's deviation in units of the clip.
    epsilon: Above | None = None  # The noise is such that all planned passes over the data have this epsilon in sum.
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5  # The delta of (epsilon, delta) differential privacy.
    weights: Literal["frozen", "trained"] = "frozen"
    """Weights of stages that compute on raw samples: kept as they begin, so that no message depends on another sample
    than its own; or trained, and then what they reveal of samples is not covered."""
    labels: Literal["stay", "public"] = "stay"  # Whether labels may leave as they are.

    def __post_init__(self) -> None:
        for first, second in (("clip", "clip_rms"), ("noise_multiplier", "epsilon")):
            given = [name for name in (first, second) if getattr(self, name) is not None]
            if len(given) != 1:
                got = f"both {first} and {second}" if given else f"neither {first} nor {second}"
                raise UserError(f"privacy.activations: got {got}, expected one of them")
        for name in ("clip", "clip_rms", "noise_multiplier", "epsilon"):
            value = getattr(self, name)
            if value is not None and not LEAST <= value <= MOST:
                raise UserError(f"privacy.activations.{name}: got {value:g}, expected {LEAST:g} to {MOST:g}")

    def norm(self, values: int) -> float:
        """The largest norm of a sample that has so many values at the boundary."""
        return self.clip if self.clip is not None else (self.clip_rms or 0.0) * math.sqrt(values)


SPENT = "privacy.json"


def format_epsilon(epsilon: float) -> str:
    """Three digits; "12,345" where they would need an exponent."""
    return f"{epsilon:.3g}" if epsilon < 999.5 else f"{epsilon:,.0f}"


class SampleRange(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of the data order whose samples left a holder, each once."""

    first: int
    end: int  # one past the last
    mu_squared: float  # the square of mu of one pass


class PrivacySpent(msgspec.Struct, frozen=True, kw_only=True):
    """Local (epsilon, delta)-differential privacy of each sample: one put in another's place."""

    delta: float
    epsilon: float = 0.0  # epsilon of the training sample that was sent most often
    heldout_epsilon: float = 0.0
    by_epoch: tuple[float, ...] = ()  # epsilon after each pass over the training samples, the one under way included
    samples: tuple[int, ...]  # training samples: how many, or of each of several holders with data of their own
    stretches: tuple[tuple[SampleRange, ...], ...] = ()  # stretches, in the order of each holder's data, that were sent
    heldout_mu_squared: float = 0.0

    def __str__(self) -> str:
        heldout = f"; held-out samples {format_epsilon(self.heldout_epsilon)}" if self.heldout_epsilon else ""
        epochs = f"{len(self.by_epoch)} epoch{'' if len(self.by_epoch) == 1 else 's'}"
        return f"epsilon {format_epsilon(self.epsilon)} at delta {self.delta:g} after {epochs}{heldout}"


def read_spent(folder: Path) -> PrivacySpent | None:
    """None where nothing was counted. UserError for what cannot be read."""
    try:
        return read_json(folder / SPENT, PrivacySpent)
    except FileNotFoundError:
        return None
