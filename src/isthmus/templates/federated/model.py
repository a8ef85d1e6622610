"""The model of job.toml. Change it as you like: any nn.Module will do whose forward takes the data's columns as keyword
arguments and returns a loss. It is cut into stages by operator, so it needs no special layers."""

import torch
from torch import nn
from torch.nn import functional as F


def convolution(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1), nn.GroupNorm(4, channels_out), nn.ReLU()
    )


class Classifier(nn.Module):
    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(channels, width, 1),
            convolution(width, 2 * width, 2),
            convolution(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """`pixel_values`: float32 [batch, channels, height, width]; `labels`: int64 [batch]."""
        logits = self.head(self.body(pixel_values))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def build(channels: int = 1, classes: int = 10, width: int = 16) -> Classifier:
    """Options of [model] in job.toml are the arguments."""
    return Classifier(channels, classes, width)
