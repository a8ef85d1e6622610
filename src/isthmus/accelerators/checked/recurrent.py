"""Cells of recurrent layers. For devices other than the CPU torch asks for one operator per cell, which it has for CUDA
alone: here they are what the CPU computes."""

from __future__ import annotations

import torch
from torch import Tensor


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
