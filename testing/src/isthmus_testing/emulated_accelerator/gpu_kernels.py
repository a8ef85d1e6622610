"""Kernels that torch has for GPUs alone, from what the CPU computes: updates in one kernel for all parameters, without
memory of their own, the sums of torch's loop on the CPU, to the bit, where the CPU's own fused kernels round otherwise;
and cells of recurrent layers, for which torch asks devices other than the CPU for one operator each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fused_adamw(
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


def fused_sgd(
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


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_thnn_fused_lstm_cell: gates [B, 4H] of a cell [B, H]. The third result is for CUDA's backward."""
    gates = _biased(hidden_gates, hidden_bias) + _biased(input_gates, input_bias)
    put, keep, new, out = gates.chunk(4, 1)
    after = keep.sigmoid() * cell + put.sigmoid() * new.tanh()
    return out.sigmoid() * after.tanh(), after, torch.empty_like(gates)


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_thnn_fused_gru_cell: gates [B, 3H] of a hidden state [B, H]. The second result is for CUDA's backward."""
    input_gates, hidden_gates = _biased(input_gates, input_bias), _biased(hidden_gates, hidden_bias)
    (r_in, z_in, n_in), (r_hid, z_hid, n_hid) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    new = (n_in + n_hid * (r_hid + r_in).sigmoid()).tanh()
    return (hidden - new) * (z_hid + z_in).sigmoid() + new, torch.empty_like(input_gates)


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias
