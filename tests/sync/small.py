"""A small model under a mode, and a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isthmus.sync import Sync, attach, mode_names

MEETING = [mode for mode in mode_names() if mode != "decoupled"]
"""Modes whose workers meet at a step."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Bytes:
    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        return tensor.view(torch.uint8)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        return payload.view(dtype).view(tuple(shape))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).square().mean()


def attached(mode: str, period: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer, Sync]:
    model = net()
    optimizer = sgd(model)
    return model, optimizer, attach(model, optimizer, mode=mode, period=period)
