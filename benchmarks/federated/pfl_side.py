"""pfl 0.6 (Apple), its simulated backend: one process, or several under torchrun with cohorts sorted by size."""
# Runs in an environment of its own, whose packages the type checker does not see.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import Rounds, Task, weights_of

TO_LOOK = 1 << 30
"""The first round is always evaluated: the batch size by which that is told from training, and made cheap."""


class WithLoss(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(pixels, labels)["loss"]

    def metrics(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        return {"samples": Weighted(len(labels), 1)}  # nothing is evaluated: it would cost only this side


class Shuffled(Dataset):
    """A client in one round. An epoch is in that round's order, which `iter` begins anew for the next."""

    def __init__(self, task: Task, round_: int, client: int) -> None:
        first, last = task.offsets[client : client + 2]
        super().__init__((task.pixels[first:last], task.labels[first:last]), user_id=str(client))
        self._epochs = task.shuffled(round_, client)

    def iter(self, batch_size: int):
        if batch_size == TO_LOOK:
            return [(self.raw_data[0][:1], self.raw_data[1][:1])]
        pixels, labels = next(self._epochs)
        return zip(pixels.split(batch_size), labels.split(batch_size), strict=True)


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.rounds = Rounds()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.rounds.end()
        return False, Metrics()


class Sizes(dict):
    """By (round, client), as the sampler names its users."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __missing__(self, key: tuple[int, int]) -> int:
        return self._task.samples(key[1])


def run(task: Task, folder: Path, options: dict[str, int]) -> None:
    drawn = itertools.cycle([(r, client) for r, cohort in enumerate(task.cohorts) for client in cohort])
    sizes = Sizes(task) if options["processes"] > 1 else None
    data = FederatedDataset(lambda user: Shuffled(task, *user), lambda: next(drawn), sizes)
    module = WithLoss(task.model())
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=len(task.cohorts[0]),
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=task.epochs, local_learning_rate=task.learning_rate, local_batch_size=task.batch_size
        ),
        NNEvalHyperParams(local_batch_size=TO_LOOK),
        callbacks=[clock],
    )
    if get_framework_module().distributed.global_rank == 0:
        clock.rounds.write(folder, weights_of(module))
