"""Random factors for durations, replayable from a seed."""

from __future__ import annotations

import numpy as np


class Jitter:
    """Log-normal factors with mean 1: exp(sigma z - sigma^2 / 2), z normal. With sigma 0 exactly 1."""

    def __init__(self, sigma: float, seed: int) -> None:
        self._sigma = sigma
        self._generator = np.random.default_rng(seed)

    def __call__(self) -> float:
        if not self._sigma:
            return 1.0
        return float(self._generator.lognormal(-(self._sigma**2) / 2, self._sigma))
