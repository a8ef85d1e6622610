"""The loss scale of float16: small gradients would be zero there, so all are computed so many times as large.

    backward of scale * loss ─► sums in float32 ─► collect: times 1 / scale ─► finite everywhere: update, else left out

The scale moves as torch.amp.GradScaler's: it shrinks after a step with a gradient that is not finite, and grows after
`growth_interval` steps without one. Every stage of a replica hears of the same steps, and so has the same scale
without being told. Replicas that sum gradients see the same sums; those that average parameters each have their own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from isthmus.wire_types import MOST_COUNT

LOSS_SCALE = ".loss_scale"
"""Among the tensors of a state: [scale, steps since it changed], float32. No module has a name that begins so."""
LOSS_SCALE_SHAPE = (2,)


class LossScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a loss scale begins and moves; the defaults are torch.amp.GradScaler's."""

    init_scale: Annotated[float, Meta(gt=0, le=2.0**100)] = 2.0**16  # The scale of the first step.
    growth_factor: Annotated[float, Meta(ge=1, le=MOST_COUNT)] = 2.0  # 1 keeps it as it is after steps that are finite.
    backoff_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """The scale is multiplied by this after a step that is not finite."""
    growth_interval: Annotated[int, Meta(ge=1, lt=2**24)] = 2000  # Finite steps in a row after which the scale grows.


class LossScale:
    """The factor of the loss's gradient on a stage, step by step. It is kept on the host."""

    def __init__(self, config: LossScaling, saved: Tensor | None = None) -> None:
        """`saved` is a `state`, to go on from."""
        self._config = config
        self.value, self._steps = config.init_scale, 0
        if saved is not None:
            value, steps = saved.tolist()
            self.value, self._steps = float(value), int(steps)

    def updated(self) -> None:
        """The step's gradients were finite, and are applied."""
        self._steps += 1
        if self._steps == self._config.growth_interval:
            self._steps = 0
            grown = _rounded(self.value * self._config.growth_factor)
            self.value = grown if grown < float("inf") else self.value

    def left_out(self) -> None:
        """They were not, somewhere."""
        self._steps = 0
        self.value = _rounded(self.value * self._config.backoff_factor)

    @property
    def overflows(self) -> bool:
        """Return whether gradients that are not finite may be the scale's doing: a smaller one can help."""
        return self.value > 1.0

    def state(self) -> Tensor:
        return torch.tensor([self.value, float(self._steps)])


def _rounded(value: float) -> float:
    """Return the scale as float32, in which torch keeps it and a state holds it."""
    return float(torch.tensor(value))
