"""Whether numbers are finite, at the price of reading them once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_TYPES = (torch.bfloat16, torch.float16)


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite; integers are finite.

    A sum is finite only if all its terms are, and reads each element once without writing anything. Sums of finite
    elements may be too large for their type: then each element is looked at.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach()
    total = values.sum(dtype=torch.float32 if tensor.dtype in HALF_TYPES else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


def finite_flag(tensor: Tensor) -> Tensor:
    """The same as a tensor of one bool where `tensor` lies: the host does not wait for it."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.linalg.vector_norm(tensor.detach(), math.inf).isfinite()
