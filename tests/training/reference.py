"""The plain loop on one machine: what every distributed run must equal. Slow, short and obviously right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from isthmus.graph.outputs import split_outputs
from isthmus.training.engine import EngineConfig
from isthmus.training.optim import Optimizers, clip, gradient_norms


def reference_step(
    module: nn.Module, micro_batches: Sequence[Mapping[str, Tensor]], config: EngineConfig
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by parameter name) of one step of the eager module over the micro-batches.

    Tied parameters appear once, under the first of their names.
    """
    module.train()
    module.zero_grad(set_to_none=True)
    losses: list[float] = []
    counts: list[float] = []
    summed = False
    for batch in micro_batches:
        loss, count, _ = split_outputs(module(**batch))
        summed = count is not None
        (loss if summed else loss / len(micro_batches)).backward()
        losses.append(float(loss.detach()))
        counts.append(1.0 if count is None else float(count))
    total = sum(counts) or 1.0
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    if summed:
        for gradient in gradients.values():
            gradient.div_(total)
    return sum(losses) / total, gradients


def reference_update(
    module: nn.Module, optimizers: Optimizers, step: int, config: EngineConfig, loss: float = 0.0
) -> None:
    """Clip and apply, as every stage does for its own parameters; or leave a step out whose loss or gradient norm is
    not finite, with the optimizers' counts of steps, as torch's GradScaler does."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norms = gradient_norms(gradients)
    if config.non_finite == "skip" and not (math.isfinite(loss) and bool(torch.isfinite(norms).all())):
        optimizers.drop_gradients()
        return
    if config.clip_norm > 0:
        clip(gradients, norms, config.clip_norm)
    optimizers.step(step)


def delayed_steps(
    module: nn.Module, steps: Sequence[Sequence[Mapping[str, Tensor]]], config: EngineConfig, optimizers: Optimizers
) -> list[float]:
    """Losses of steps at the weights before the last update: w(t + 1) = w(t) - update(gradient at w(t - 1))."""
    parameters, losses = list(module.parameters()), list[float]()
    previous = [p.detach().clone() for p in parameters]
    for step, micro_batches in enumerate(steps):
        newest = [p.detach().clone() for p in parameters]
        _put(parameters, previous)
        losses.append(reference_step(module, micro_batches, config)[0])
        _put(parameters, newest)
        reference_update(module, optimizers, step, config, losses[-1])
        previous = newest
    return losses


@torch.no_grad()
def _put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def reference_loss(module: nn.Module, micro_batches: Sequence[Mapping[str, Tensor]]) -> float:
    """Held-out loss of the eager module."""
    module.eval()
    losses: list[float] = []
    counts: list[float] = []
    for batch in micro_batches:
        loss, count, _ = split_outputs(module(**batch))
        losses.append(float(loss))
        counts.append(1.0 if count is None else float(count))
    return sum(losses) / (sum(counts) or 1.0)
