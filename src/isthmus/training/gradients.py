"""Types and layouts of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.training.finite import HALF_TYPES


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of gradients and master weights of a parameter that computes in `dtype`. Half types add up too
    coarsely: sums and optimizers work on float32."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def keep_layout(kept: dict[int, Tensor], number: int, leaf: Tensor, gradient: Tensor) -> None:
    """Keep a gradient that torch would copy into the leaf's strides: the stage before would sum in another order."""
    if gradient.stride() != leaf.stride():
        kept[number] = gradient


def no_gradient(parameter: Tensor) -> Tensor:
    """Zeros, of the type that gradients of the parameter have."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter.dtype), requires_grad=False)
