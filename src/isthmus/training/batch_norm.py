"""Batch norm over all samples of a micro-batch, where each rank has a share of them (as torch's SyncBatchNorm).

    mean = sum over ranks of sum(x) / N      var = sum over ranks of sum((x - mean)^2) / N      N: of all ranks

Both sums are differentiated: the gradient of a sum over ranks is the sum over ranks of its gradients. Kept statistics
become the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from isthmus.graph.operators import operator_of
from isthmus.training.collectives import Collectives

BATCH_NORM = "aten.batch_norm.default"


class _BatchNormSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Collectives) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradients[0]), None


def batch_norm_of(ranks: Collectives) -> Callable[..., Tensor]:
    """In place of the operator, with its arguments; all ranks have equally many samples."""
    alone = cast("Callable[..., Tensor]", operator_of(BATCH_NORM))

    def batch_norm(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        training: bool,
        momentum: float,
        *options: object,
    ) -> Tensor:
        if not training:
            return alone(x, weight, bias, mean, variance, training, momentum, *options)
        return _normalised(x, (weight, bias), (mean, variance), momentum, cast(float, options[0]), ranks)

    return batch_norm


def _normalised(
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
    ranks: Collectives,
) -> Tensor:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    others = [dim for dim in range(x.dim()) if dim != 1]
    along = [1, -1, *[1] * (x.dim() - 2)]
    count = ranks.count * x.numel() // x.shape[1]

    def over_all(values: Tensor) -> Tensor:
        return cast(Tensor, _BatchNormSum.apply(values.sum(others), ranks)) / count

    mean = over_all(wide)
    centred = wide - mean.view(along)
    variance = over_all(centred.square())
    _keep(kept, mean, variance * (count / max(count - 1, 1)), momentum)
    found = centred * torch.rsqrt(variance + eps).view(along)
    weight, bias = affine
    if weight is not None:
        found = found * weight.to(found.dtype).view(along)
    if bias is not None:
        found = found + bias.to(found.dtype).view(along)
    return found.to(x.dtype)


@torch.no_grad()
def _keep(kept: tuple[Tensor | None, Tensor | None], mean: Tensor, variance: Tensor, momentum: float) -> None:
    for statistic, value in zip(kept, (mean, variance), strict=True):
        if statistic is not None:
            statistic.mul_(1 - momentum).add_(value.to(statistic.dtype), alpha=momentum)
