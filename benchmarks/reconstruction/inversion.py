"""Who receives feature maps tries to see the images behind them: linear inversion, and a decoder that learns to."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DECODER_STEPS = 300
CLASSIFIER_STEPS = 300
BATCH = 128
PENALTIES = (1e-3, 1e-1, 1e1, 1e3)


class Seen(NamedTuple):
    """How well images were seen."""

    error: float
    """Mean squared error over that of guessing the mean image: 0 is the image itself, 1 is nothing."""
    psnr_db: float
    accuracy: float
    """Of a classifier of images, on what was seen."""


class Attacker:
    """Has images of the same kind as the victims', their labels, and the holder's stage with its noise: it can make as
    many messages of its own images as it wants."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int = 0) -> None:
        """`images`: [n, pixels] in 0 .. 1."""
        self._draws = torch.Generator().manual_seed(seed)
        self._images, self._mean = images, images.mean(0)
        self._kept = len(images) * 4 // 5
        """Of its images, the first so many are learnt from; with the others it chooses among what it learnt."""
        self._classifier = _mlp(images.shape[1], 10)
        self._fit(self._classifier, images, labels, CLASSIFIER_STEPS)

    def linear(self, own: Tensor, messages: Tensor) -> Tensor:
        """Ridge regression from messages to images, its penalty chosen on the images left for that."""
        kept = self._kept
        middle, size = own.mean(0), own.std().clamp_min(1e-12)
        x, y = ((own - middle) / size).double(), (self._images - self._mean).double()
        gram, cross = x[:kept].T @ x[:kept], x[:kept].T @ y[:kept]
        eye = torch.eye(x.shape[1], dtype=torch.float64) * kept

        def maps(penalty: float) -> Tensor:
            return torch.linalg.solve(gram + penalty * eye, cross)

        best = min((maps(p) for p in PENALTIES), key=lambda m: float((x[kept:] @ m - y[kept:]).square().mean()))
        return (((messages - middle) / size).double() @ best).float() + self._mean

    def decoder(self, own: Tensor, messages: Tensor) -> Tensor:
        """A network of two hidden layers, trained on `own`: [draws, n, values], messages of its images, drawn anew.

        What it says beyond the mean image is shrunk as suits images that it was not trained on: where noise hides all,
        it had better say nothing."""
        middle, size, kept = own.mean((0, 1)), own.std().clamp_min(1e-12), self._kept
        network = _mlp(own.shape[2], self._images.shape[1])
        scaled, images = (own - middle) / size, self._images - self._mean
        self._fit(network, scaled[:, :kept].flatten(0, 1), images[:kept].repeat(len(own), 1), DECODER_STEPS)
        with torch.no_grad():
            tried, right = network(scaled[0, kept:]), images[kept:]
            shrunk = float((tried * right).sum() / tried.square().sum().clamp_min(1e-12))
            return min(max(shrunk, 0.0), 1.0) * network((messages - middle) / size) + self._mean

    def _fit(self, network: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
            rows = torch.randint(len(inputs), (BATCH,), generator=self._draws)
            found = network(inputs[rows])
            whole = targets.is_floating_point()
            loss = F.mse_loss(found, targets[rows]) if whole else F.cross_entropy(found, targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def judged(self, found: Tensor, images: Tensor, labels: Tensor) -> Seen:
        """Of victims' images and labels."""
        error = float((found.clamp(0, 1) - images).square().mean())
        with torch.no_grad():
            right = self._classifier(found.clamp(0, 1)).argmax(1) == labels
        nothing = float((self._mean - images).square().mean())
        return Seen(error / nothing, -10 * math.log10(max(error, 1e-12)), float(right.float().mean()))


def _mlp(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))
