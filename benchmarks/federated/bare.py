"""The bare loop: one process, one module, torch's fused lists; and what a client's training is for the pool."""
# torch names its list operations as private ones; its own optimizers use them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from pathlib import Path

import torch
from task import Rounds, Task, weights_of


class Trainer:
    """Trains clients on one module; `start` are the round's weights, which the caller keeps."""

    def __init__(self, task: Task, start: list[torch.Tensor]) -> None:
        self.module = task.model()
        self._task = task
        self._start = start
        self.parameters = list(self.module.parameters())
        self._data = [p.data for p in self.parameters]

    def train(self, round_: int, client: int) -> list[torch.Tensor]:
        """The client's weights, until the next call."""
        torch._foreach_copy_(self._data, self._start)
        rate = -self._task.learning_rate
        for pixels, labels in self._task.batches(round_, client):
            self.module(pixels, labels)["loss"].backward()
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_add_(self._data, gradients, alpha=rate)
            for p in self.parameters:
                p.grad = None
        return self._data


def run(task: Task, folder: Path, _: dict[str, int]) -> None:
    start = [p.detach().clone() for p in task.model().parameters()]
    trainer, rounds = Trainer(task, start), Rounds()
    total = [torch.zeros_like(p) for p in start]
    for round_, cohort in enumerate(task.cohorts):
        weight = sum(map(task.samples, cohort))
        torch._foreach_zero_(total)
        for client in cohort:
            torch._foreach_add_(total, trainer.train(round_, client), alpha=task.samples(client) / weight)
        torch._foreach_copy_(start, total)
        if task.device != "cpu":
            torch.accelerator.synchronize()
        rounds.end()
    torch._foreach_copy_([p.data for p in trainer.parameters], start)
    rounds.write(folder, weights_of(trainer.module))
