"""What values must be before they leave a data holder: clipped per sample, and covered with Gaussian noise."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.errors import UserError

LEAST, MOST = 1e-12, 1e9
"""What float64 and the accountant can hold."""
Above = Annotated[float, Meta(gt=0)]


class ActivationNoise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises UserError where not exactly one clip and one measure of noise is given."""

    clip: Above | None = None
    """The L2 norm that no sample's values exceed, all that leave together."""
    clip_rms: Above | None = None
    """The same in proportion to the boundary: their root mean square."""
    noise_multiplier: Above | None = None
    """The noise's deviation in units of the clip."""
    epsilon: Above | None = None
    """The noise is such that all planned passes over the data have this epsilon in sum."""
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    """Of (epsilon, delta) differential privacy."""
    weights: Literal["frozen", "trained"] = "frozen"
    """Of stages that compute on raw samples: kept as they begin, so that no message depends on another sample than its
    own; or trained, and then what they reveal of samples is not covered."""
    labels: Literal["stay", "public"] = "stay"
    """Whether labels may leave as they are."""

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
