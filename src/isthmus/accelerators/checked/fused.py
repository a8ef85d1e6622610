"""Updates in one kernel for all parameters, as GPUs have them, without memory of their own: the sums of torch's loop on
the CPU, to the bit, where the CPU's own fused kernels round otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    greatest: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    **others: object,
) -> None:
    _refuse(others)
    for parameter, gradient, mean, square, count in zip(parameters, gradients, means, squares, steps, strict=True):
        step = count.item()
        if weight_decay:
            parameter.mul_(1 - lr * weight_decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = lr / (1 - beta1**step)
        divisor = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
        parameter.addcdiv_(mean, divisor, value=-size)


def sgd(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moved: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    is_first_step: bool,
    **others: object,
) -> None:
    _refuse(others)
    for number, (parameter, plain) in enumerate(zip(parameters, gradients, strict=True)):
        gradient = plain.add(parameter, alpha=weight_decay) if weight_decay else plain
        if momentum:
            mean = moved[number]
            if is_first_step:
                mean.copy_(gradient)
            else:
                mean.mul_(momentum).add_(gradient, alpha=1 - dampening)
            gradient = gradient.add(mean, alpha=momentum) if nesterov else mean
        parameter.add_(gradient, alpha=-lr)


def _refuse(others: dict[str, object]) -> None:
    if asked := sorted(name for name, value in others.items() if value):
        raise NotImplementedError(f"fused updates of the emulated accelerator: {', '.join(asked)}")
