"""Random numbers: one stream per client, round and use, whoever draws from it and when."""

from __future__ import annotations

from typing import Literal

import numpy as np

Use = Literal["order", "model", "cohort", "dropout", "data", "noise", "partition", "pace"]
_USES: tuple[Use, ...] = ("order", "model", "cohort", "dropout", "data", "noise", "partition", "pace")


def stream(seed: int, use: Use, round_: int = 0, client: int = 0) -> np.random.Generator:
    """Equal numbers for equal arguments, unrelated ones for others. All from 0 on."""
    return np.random.default_rng([seed, _USES.index(use), round_, client])


def torch_seed(seed: int, round_: int, client: int) -> int:
    """For a model that draws while it trains (dropout)."""
    return int(stream(seed, "model", round_, client).integers(2**62))
