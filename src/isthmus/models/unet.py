"""A small U-Net: skip connections that cross several cuts (after Ronneberger et al. 2015).

stem ──────── skip 0 ────────┬──► up 0 ──► (+) ──► head
  └► down 0 ─ skip 1 ─► up 1 ┘│             ▲
       └► down 1 ► bottom ─┘  └─────────────┘
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional as F

from isthmus.errors import UserError

Positive = Annotated[int, Meta(ge=1)]
Norm = Literal["group", "batch", "none"]


class UNetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a `UNet`."""

    channels: Positive = 1  # Channels of an image.
    classes: Positive = 10  # Different labels.
    width: Positive = 16  # Channels at full resolution.
    depth: Positive = 2  # How often height and width are halved; both must be multiples of 2 ** depth.
    task: Literal["classification", "segmentation"] = "classification"  # One label per image, or one per pixel.
    norm: Norm = "group"  # The normalisation after a convolution.


def _normalisation(norm: Norm, channels: int) -> nn.Module:
    match norm:
        case "group":
            return nn.GroupNorm(math.gcd(8, channels), channels)
        case "batch":
            return nn.BatchNorm2d(channels)
        case "none":
            return nn.Identity()


def _convolve(norm: Norm, channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=norm == "none"),
        _normalisation(norm, channels_out),
        nn.ReLU(),
    )


class Up(nn.Module):
    """Doubles height and width, then mixes in the skip of that size."""

    def __init__(self, norm: Norm, channels_in: int, channels_out: int) -> None:
        super().__init__()
        # Not nearest upsampling: its backward is not deterministic on CUDA.
        self.grow = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)
        self.mix = _convolve(norm, 2 * channels_out, channels_out)

    def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cat((self.grow(hidden), skip), dim=1))


class UNet(nn.Module):
    """Classifies an image, or each of its pixels, and returns its own loss."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * 2**level for level in range(config.depth + 1)]
        pairs = list(pairwise(widths))
        self.stem = _convolve(config.norm, config.channels, widths[0])
        self.downs = nn.ModuleList(_convolve(config.norm, a, b, stride=2) for a, b in pairs)
        self.bottom = _convolve(config.norm, widths[-1], widths[-1])
        self.ups = nn.ModuleList(Up(config.norm, b, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(widths[0], config.classes, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean cross-entropy (nats, float32 scalar), and the logits.

        `pixel_values`: float [B, channels, H, W]. `labels`: int64, [B] to classify (logits [B, classes]),
        [B, H, W] to segment (logits [B, classes, H, W]).
        """
        multiple = 2**self.config.depth
        height, width = pixel_values.shape[-2:]
        if height % multiple or width % multiple:
            raise UserError(
                f"unet option 'depth': {self.config.depth} needs sides that are multiples of {multiple}, "
                f"got an image of {height}x{width}"
            )
        hidden = self.stem(pixel_values)
        skips: list[torch.Tensor] = []
        for down in self.downs:
            skips.append(hidden)
            hidden = down(hidden)
        hidden = self.bottom(hidden)
        for up, skip in zip(self.ups, reversed(skips), strict=True):
            hidden = up(hidden, skip)
        # The outermost skip again, as a residual: one tensor that two far-apart places of the graph use.
        logits = self.head(hidden + skips[0])
        if self.config.task == "classification":
            logits = logits.mean(dim=(2, 3))
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
