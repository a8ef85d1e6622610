"""The outer step of replicas that exchange what they have moved: DiLoCo's, and Streaming DiLoCo's."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

RATE, MOMENTUM = 0.7, 0.9
"""DiLoCo's."""
DELAY, MIXING = 1, 0.5
"""Of Streaming DiLoCo here."""


class OuterOptimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGD with Nesterov momentum on the mean of what the replicas have moved since the last outer step.

    DiLoCo (2023, Alg. 1) has no delay and no mixing, Streaming DiLoCo (2025, Alg. 2) has both.
    """

    rate: Annotated[float, Meta(gt=0)] = RATE
    momentum: Annotated[float, Meta(ge=0, lt=1)] = MOMENTUM
    delay: Annotated[int, Meta(ge=0)] = 0
    """Steps between the start of an exchange and its use: tau. 0 waits for it."""
    mixing: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of a replica's own parameters that stays when the outer ones arrive: alpha."""
