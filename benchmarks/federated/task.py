"""What every side reads from a workload's folder: clients' samples, who takes part, in which order, from which weights.

Needs torch and numpy only: the peers have environments of their own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import NETWORKS, Classifier
from torch import Tensor

DEVICE = "COMPARED_DEVICE"
"""The environment's variable that says where clients train; the CPU without it."""


class Task:
    """Read-only. Samples lie in mapped files, so that several processes share them."""

    def __init__(self, folder: Path) -> None:
        settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
        self.folder = folder
        self.device = os.environ.get(DEVICE, "cpu")
        self.network: str = settings["network"]
        self.rounds: int = settings["rounds"]
        self.epochs: int = settings["epochs"]
        self.batch_size: int = settings["batch_size"]
        self.learning_rate: float = settings["learning_rate"]
        self.pixels = torch.from_numpy(np.load(folder / "pixels.npy", mmap_mode="c"))
        self.labels = torch.from_numpy(np.load(folder / "labels.npy", mmap_mode="c"))
        self.offsets: list[int] = np.load(folder / "offsets.npy").tolist()
        self.cohorts: list[list[int]] = np.load(folder / "cohorts.npy").tolist()
        self._orders = torch.from_numpy(np.load(folder / "orders.npy"))
        self._order_offsets: list[int] = np.load(folder / "order_offsets.npy").tolist()
        self._place = [{client: place for place, client in enumerate(cohort)} for cohort in self.cohorts]

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    def samples(self, client: int) -> int:
        return self.offsets[client + 1] - self.offsets[client]

    def model(self) -> Classifier:
        """With the weights that all begin with."""
        module = NETWORKS[self.network]()
        load_weights(module, torch.from_numpy(np.load(self.folder / "weights.npy")))
        return module.to(self.device)

    def shuffled(self, round_: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each epoch: all samples of the client, in its order of this round."""
        first, last = self.offsets[client], self.offsets[client + 1]
        pixels, labels = self.pixels[first:last], self.labels[first:last]
        at = self._order_offsets[round_ * len(self.cohorts[0]) + self._place[round_][client]]
        for epoch in range(self.epochs):
            start = at + epoch * (last - first)
            order = self._orders[start : start + last - first]
            yield pixels[order].to(self.device), labels[order].to(self.device)

    def batches(self, round_: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in self.shuffled(round_, client):
            yield from zip(pixels.split(self.batch_size), labels.split(self.batch_size), strict=True)


class Rounds:
    """When each round ended, and the weights at the end."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def end(self) -> None:
        self.ended_s.append(time.monotonic())

    def write(self, folder: Path, weights: Tensor) -> None:
        (folder / "rounds.json").write_text(json.dumps(self.ended_s))
        np.save(folder / "weights.npy", weights.numpy())


def weights_of(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).cpu()


def load_weights(module: torch.nn.Module, weights: Tensor) -> None:
    parameters = list(module.parameters())
    with torch.no_grad():
        for p, part in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view(p.shape))
