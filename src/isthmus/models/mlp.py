"""The smallest classifiers: a multi-layer perceptron, and a convolutional net for digits."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional as F

from isthmus.errors import UserError

Positive = Annotated[int, Meta(ge=1)]


class MLPConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of an `MLP`."""

    features: Positive = 64  # Numbers per sample.
    width: Positive = 64  # Units of a hidden layer.
    layers: Annotated[int, Meta(ge=0)] = 2  # Hidden layers.
    classes: Positive = 10  # Different labels.


class MLP(nn.Module):
    """A fully connected classifier with ReLU, of `pixel_values` and `labels`, that returns its own loss."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        sizes = [config.features] + [config.width] * config.layers
        hidden = [part for size_in, size_out in pairwise(sizes) for part in (nn.Linear(size_in, size_out), nn.ReLU())]
        self.config = config
        self.body = nn.Sequential(*hidden, nn.Linear(sizes[-1], config.classes))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """`pixel_values`: float [B, ...] with `features` numbers per sample; `labels`: int64 [B].

        Returns `loss` (mean cross-entropy in nats, float32 scalar) and `logits` [B, classes].
        """
        flat = pixel_values.flatten(1)
        if flat.shape[1] != self.config.features:
            raise UserError(f"mlp option 'features': {self.config.features}, got samples of {flat.shape[1]} numbers")
        logits = self.body(flat)
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


class CNNConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a `CNN`."""

    channels: Positive = 1  # Channels of an image.
    width: Positive = 16  # Channels after the first convolution.
    stages: Positive = 3  # Convolutions; each but the first doubles the channels and halves the sides.
    classes: Positive = 10  # Different labels.
    batch_norm: bool = False  # Whether batch norm follows each convolution.


class CNN(nn.Module):
    """A convolutional classifier of images of any size, of `pixel_values` and `labels`, that returns its own loss."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        channels = config.channels
        for stage in range(config.stages):
            width = config.width * 2**stage
            stride = 1 if stage == 0 else 2
            parts.append(nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=not config.batch_norm))
            if config.batch_norm:
                parts.append(nn.BatchNorm2d(width))
            parts.append(nn.ReLU())
            channels = width
        self.config = config
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """`pixel_values`: float [B, channels, H, W]; `labels`: int64 [B].

        Returns `loss` (mean cross-entropy in nats, float32 scalar) and `logits` [B, classes].
        """
        logits = self.head(self.body(pixel_values).mean(dim=(2, 3)))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
