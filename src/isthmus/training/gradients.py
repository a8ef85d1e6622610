"""Types and layouts of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.training.finite import HALF_TYPES

STRETCH = 1 << 20  # elements of a large tensor that are worked on at once, where torch needs memory for each of them


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of gradients and master weights of a parameter that computes in `dtype`. Half types add up too
    coarsely: sums and optimizers work on float32."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def keep_layout(kept: dict[int, Tensor], number: int, leaf: Tensor, gradient: Tensor) -> None:
    """Keep a gradient that torch would copy into the leaf's strides: the stage before would sum in another order."""
    if gradient.stride() != leaf.stride():
        kept[number] = gradient


def added(total: Tensor, gradient: Tensor) -> Tensor:
    """Add a gradient to the sum, in place unless that is sparse. torch copies one of another type as a whole before it
    adds: large ones are added a stretch at a time."""
    if gradient.is_sparse:
        return total.add_(gradient.to(total.dtype))
    if gradient.dtype == total.dtype or not (total.is_contiguous() and gradient.is_contiguous()):
        return total.add_(gradient)
    for part, more in zip(in_stretches(total), in_stretches(gradient), strict=True):
        part.add_(more)
    return total


def in_stretches(tensor: Tensor) -> Sequence[Tensor]:
    """Return views of a tensor's elements in order, each of at most STRETCH of them."""
    return tensor.view(-1).split(STRETCH) if tensor.numel() > STRETCH else (tensor,)


def no_gradient(parameter: Tensor) -> Tensor:
    """Zeros, of the type that gradients of the parameter have."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter.dtype), requires_grad=False)
