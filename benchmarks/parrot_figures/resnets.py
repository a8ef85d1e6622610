"""The paper's two convolutional models in torch alone, with batch norm, and a few samples of their shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec


class Block(nn.Module):
    """ResNet's basic block, or with `wide` its bottleneck (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int, *, wide: bool) -> None:
        super().__init__()
        out = 4 * channels if wide else channels
        shapes = [(channels_in, channels, 3, stride), (channels, out, 3, 1)]
        if wide:
            shapes = [(channels_in, channels, 1, 1), (channels, channels, 3, stride), (channels, out, 1, 1)]
        parts: list[nn.Module] = []
        for i, o, kernel, step in shapes:
            parts += [nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.body = nn.Sequential(*parts[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Of images [B, C, side, side]; returns the mean cross-entropy."""

    def __init__(self, depths: Sequence[int], classes: int, *, wide: bool, small: bool) -> None:
        """`small` images are grey and meet a 3 x 3 convolution first, others 7 x 7 and a pooling, as in the paper."""
        super().__init__()
        stem: list[nn.Module] = [nn.Conv2d(1, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        if not small:
            stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        channels_in = 64
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(Block(channels_in, 64 << stage, stride, wide=wide))
                channels_in = (256 if wide else 64) << stage
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes))
        self.body = nn.Sequential(*stem, *blocks, *head)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(pixel_values), labels)


def resnet18() -> nn.Module:
    """For FEMNIST: 28 x 28 grey images, 62 classes, 11.2 million parameters."""
    return ResNet((2, 2, 2, 2), 62, wide=False, small=True)


def resnet50() -> nn.Module:
    """For ImageNet: 224 x 224 images, 1,000 classes, 25.6 million parameters."""
    return ResNet((3, 4, 6, 3), 1000, wide=True, small=False)


class Images:
    """One client's two samples of noise: all that counting FLOPs and bytes needs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.columns: dict[str, ColumnSpec] = {}
        self.sizes = np.array([2], dtype=np.int64)
        self.fingerprint = f"noise {shape}"

    def load(self, client: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(client)
        return {"pixel_values": torch.rand(2, *self._shape, generator=draws), "labels": torch.arange(2)}

    def load_many(self, clients: Sequence[int]) -> dict[str, Tensor]:
        several = [self.load(client) for client in clients]
        return {name: torch.cat([one[name] for one in several]) for name in several[0]}
