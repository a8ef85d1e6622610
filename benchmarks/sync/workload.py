"""What is trained, over what, and what a worker tells."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from isthmus.models import GPT, GPTConfig
from isthmus.plans import SyncPlan
from isthmus_testing.sync_modes import SyncedModel

PERIOD = 5
VOCABULARY, SEQUENCE = 256, 32

Kind = Literal["gpt", "resnet"]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One model on workers joined by equal links."""

    kind: Kind
    workers: int
    bandwidth_bit_per_s: float
    latency_s: float = 1e-3
    compute_s: float = 0.24
    """Of a step: a third of it forward. The modules' own work comes on top and is small."""
    modes: list[str]
    measured_steps: int = 2 * PERIOD


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a case."""

    case: Case
    rank: int
    interface: str
    store: str
    """A file through which the workers find each other."""


class ModeFigures(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    step_s: float
    """Mean of the measured steps, whole periods."""
    predicted_s: float | None = None
    """`simulate_sync`, for the layer times and the link that `dream` measured."""
    sent_bytes_per_step: float = 0.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What worker 0 found."""

    modes: list[ModeFigures]
    size_bytes: int
    layers: int
    plan: SyncPlan
    """`dream`'s."""
    probed_latency_s: float
    probed_byte_s: float
    model: SyncedModel | None = None
    """Layers and link as `dream` measured them."""


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.around = nn.Conv2d(into, out, 1, stride, bias=False) if into != out else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(hidden)))
        return torch.relu(self.second_norm(self.second(inner)) + self.around(hidden))


class ResNet(nn.Module):
    """ResNet-18 in small: a stem and two blocks for each of three widths, for digits of 8 x 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = (width, 2 * width, 4 * width)
        blocks = [
            Block(into, out, stride)
            for before, out in zip((width, *widths), widths, strict=False)
            for into, stride in ((before, 1 if before == out else 2), (out, 1))
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 1, 8, 8] -> [B, 10]."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def model_of(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    if kind == "resnet":
        return ResNet(32)
    return GPT(GPTConfig(vocab_size=VOCABULARY, sequence_length=SEQUENCE, width=128, layers=4, heads=4))


def loss_of(kind: Kind, model: nn.Module) -> Tensor:
    """Of a batch too small to take time: what is measured does not depend on the data."""
    if kind == "resnet":
        return nn.functional.cross_entropy(model(torch.rand(4, 1, 8, 8)), torch.randint(10, (4,)))
    ids = torch.randint(VOCABULARY, (1, SEQUENCE))
    return model(ids, ids)["loss"]
