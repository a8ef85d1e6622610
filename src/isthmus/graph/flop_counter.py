"""Torch's FLOP counter with what it lacks, which findings/torch-flop-counter-leaves-out.sh shows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """Count FLOPs of matrix products, convolutions, attention, and recurrent layers on a CPU."""
    aten = torch.ops.aten
    formulas = {
        aten.mkldnn_rnn_layer: _recurrent,
        aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * _recurrent(*args),  # all gradients, whatever is due
        aten.convolution_backward: _convolution_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _recurrent(given: Sequence[int], of_input: Sequence[int], of_state: Sequence[int], *_: Any, **__: Any) -> int:
    """One direction of one layer has two products for each step of each sequence. Torch counts 0: oneDNN fuses them."""
    return 2 * prod(given[:-1]) * (prod(of_input) + prod(of_state))


def _convolution_backward(due: Sequence[int], given: Sequence[int], weight: Sequence[int], *args: Any, **_: Any) -> int:
    """Each gradient costs what the forward does. Torch counts the weight's as if it had no groups."""
    transposed, due_for = args[4], args[7]
    return 2 * given[0] * prod((given if transposed else due)[2:]) * prod(weight) * sum(due_for[:2])
