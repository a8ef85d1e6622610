"""Metrics of plain torch on a whole set of samples, and the functions that tests measure by."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5


def top_two(outputs: object, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Share of samples whose class is among the two largest logits."""
    assert isinstance(outputs, Tensor)
    found = (outputs.topk(2).indices == batch["target"][:, None]).any(-1)
    return found.sum(), torch.full((), 1, dtype=torch.int64) * found.shape[0]


def confidence(outputs: object, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean largest probability: one scalar, the mean over samples."""
    assert isinstance(outputs, Tensor)
    return outputs.softmax(-1).amax(-1).mean()


class Classifier(nn.Module):
    """Six layers: three stages of them are a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def samples(count: int, seed: int = 0) -> dict[str, Tensor]:
    """Features [count, 6] and classes [count], which features say in part."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    noise = torch.randn(count, CLASSES, generator=generator) * 0.3
    return {"x": x, "target": (x[:, :CLASSES] + noise).argmax(-1)}


@torch.no_grad()
def measured(model: nn.Module, data: Mapping[str, Tensor], *, wide: bool = False) -> dict[str, float]:
    """Loss and metrics of the model on all samples at once. `wide`: in float32, of whatever the model returns."""
    model.eval()
    logits, target = model(data["x"]), data["target"]
    logits = logits.float() if wide else logits
    loss = F.cross_entropy(logits, target).item()
    return {
        "loss": loss,
        "accuracy": (logits.argmax(-1) == target).float().mean().item(),
        "perplexity": math.exp(loss),
        "top_two": (logits.topk(2).indices == target[:, None]).any(-1).float().mean().item(),
        "confidence": logits.softmax(-1).amax(-1).mean().item(),
    }
