"""The models of the comparison, in torch alone: every side builds the same one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Returns its own loss, as Isthmus wants it; the other sides take the same one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`pixel_values` [B, ...], `labels` [B]: mean cross-entropy, and logits [B, classes]."""
        logits = self.body(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def mlp() -> Classifier:
    """64-64-10: 4,810 parameters."""
    return Classifier(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))


def tiny() -> Classifier:
    """16-32-10: 874 parameters, for states of a few kilobytes."""
    return Classifier(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)))


def cnn() -> Classifier:
    """Two convolutions and two full layers: 428,350 parameters."""
    return Classifier(
        nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 62),
        )
    )


class Block(nn.Module):
    """ResNet's basic block, with group norm of 32 channels or fewer."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(channels // 16, channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(channels // 16, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.GroupNorm(channels // 16, channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet18() -> Classifier:
    """For grey images of any size, 62 classes: 11.2 million parameters."""
    parts: list[nn.Module] = [nn.Conv2d(1, 64, 7, 2, 3, bias=False), nn.GroupNorm(4, 64), nn.ReLU()]
    parts.append(nn.MaxPool2d(3, 2, 1))
    channels_in = 64
    for stage in range(4):
        channels = 64 * 2**stage
        for block in range(2):
            parts.append(Block(channels_in, channels, 2 if stage and not block else 1))
            channels_in = channels
    return Classifier(nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 62)))


NETWORKS = {"mlp": mlp, "tiny": tiny, "cnn": cnn, "resnet18": resnet18}
