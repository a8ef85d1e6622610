"""How far the workers are apart: Gamma = mean over k of ||mean w - w_k||^2 (DreamDDP, section 3.2).

A worker knows the mean of a layer when it has averaged it, and then no longer what it had before. A sample of at most
2048 elements per layer is kept meanwhile, so that no second copy of the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from isthmus.sync.averaging import Averager
from isthmus.sync.compressed import CompressedAverager

SAMPLED = 2048


def sample(flat: Tensor) -> Tensor:
    """Some of its elements, always the same ones; all of a small tensor's."""
    return flat.clone() if len(flat) <= SAMPLED else flat.index_select(0, _places(len(flat)).to(flat.device))


@cache
def _places(elements: int) -> Tensor:
    # Random, not every n-th: a stride may follow a matrix's columns.
    return torch.randint(elements, (SAMPLED,), generator=torch.Generator().manual_seed(elements))


class MeasuredAverage:
    """An average on its way, and how far this worker is from it."""

    def __init__(self, averager: Averager | CompressedAverager, flats: Sequence[Tensor]) -> None:
        self._flats = flats
        self._before = [sample(flat) for flat in flats]
        self._pending = averager.start(flats)

    def wait(self) -> float:
        """Until it is there. Returns ||mean - own||^2, estimated from the samples."""
        self._pending.wait()
        return sum(
            float((sample(flat) - before).double().square().mean()) * len(flat)
            for flat, before in zip(self._flats, self._before, strict=True)
            if len(flat)
        )
