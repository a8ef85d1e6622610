"""What a user's forward returns, in one form. Apart from capture, whose imports a device process can do without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from isthmus.errors import UserError


def split_outputs(result: object) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(loss, count, other outputs) of what a forward returned.

    A scalar; (loss_sum, count, ...) with both scalars; or a mapping with `loss` (and `count`, when `loss` is a sum).
    """
    count: Tensor | None = None
    others: dict[str, Tensor] = {}
    loss = result
    if isinstance(result, Mapping):
        found = cast(Mapping[str, object], result)
        if "loss" not in found:
            raise UserError(f"model: forward returned a mapping with {sorted(found)}, expected a scalar under 'loss'")
        loss, count = found["loss"], _as_count(found.get("count"))
        others = {k: v for k, v in found.items() if k not in ("loss", "count") and isinstance(v, Tensor)}
    elif isinstance(result, (tuple, list)) and result:
        values = cast("tuple[object, ...]", tuple(result))
        loss, rest = values[0], values[1:]
        if rest and (isinstance(rest[0], (int, torch.SymInt)) or (isinstance(rest[0], Tensor) and rest[0].ndim == 0)):
            count, rest = _as_count(rest[0]), rest[1:]
        others = {f"output_{i}": v for i, v in enumerate(rest) if isinstance(v, Tensor)}
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.dtype.is_floating_point:
        raise UserError(
            f"model: forward returned {_shape(loss)} as its loss, expected a scalar floating-point tensor, "
            "(loss_sum, count) or a mapping with 'loss'"
        )
    return loss, count, others


def _as_count(value: object) -> Tensor | None:
    if value is None or (isinstance(value, Tensor) and value.ndim == 0):
        return value
    if isinstance(value, (int, torch.SymInt)):
        return torch.full((), cast(int, value), dtype=torch.int64)
    raise UserError(f"model: forward returned {_shape(value)} as its count, expected an integer or a scalar tensor")


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        sizes = ", ".join(str(s) if type(s) is int else "batch" for s in value.shape)
        return f"a tensor of shape [{sizes}] and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}"
