"""One worker of one training run, in any mode, on real data: loss of the mean model, divergence, bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isthmus.sync
from isthmus.data import DataSpec, SampleOrder, load_dataset
from isthmus.models import GPT, GPTConfig
from isthmus.plans import SyncPlan
from isthmus.sync import Options

Kind = Literal["gpt", "resnet"]
PERIOD = 5
HELD_OUT = 256
WARM_UP = 40
"""The GPT's rate rises over so many steps; without, it is luck when a run leaves the bytes' mere frequencies behind."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Every worker sees `batch` samples a step, all of them different ones."""

    kind: Kind
    mode: str
    seed: int
    steps: int
    batch: int
    eval_every: int
    plan: SyncPlan | None = None
    """For `dream`: what was planned for the link that times are told of."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One run, at every evaluation."""

    setting: Setting
    steps: list[int]
    loss: list[float]
    """Of the mean model, on samples that are never trained on."""
    divergence: list[float]
    """Gamma = mean over k of ||mean w - w_k||^2, of the whole model."""
    sent_bytes: int
    """By one worker, in all."""


class Task:
    """A model and its data."""

    def __init__(self, kind: Kind, make: Callable[[], nn.Module], seed: int) -> None:
        options: dict[str, object] = (
            {"files": "stdlib", "sequence_length": 32, "max_bytes": 2_000_000} if kind == "gpt" else {}
        )
        spec = DataSpec(kind="text" if kind == "gpt" else "digits", options=options)
        self._columns = ["input_ids", "labels"] if kind == "gpt" else ["pixel_values", "labels"]
        self._train, self._held = load_dataset(spec, "train"), load_dataset(spec, "heldout")
        self._order = SampleOrder(len(self._train), seed)
        self._kind: Kind = kind
        torch.manual_seed(seed)
        self.model = make()

    def loss(self, model: nn.Module, step: int, batch: int) -> Tensor:
        """This worker's share of the step's samples."""
        place = (step * dist.get_world_size() + dist.get_rank()) * batch
        return self._loss_of(model, self._train.batch(self._order.indices(place, batch), self._columns))

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        model.eval()
        loss = self._loss_of(model, self._held.batch(range(min(HELD_OUT, len(self._held))), self._columns))
        model.train()
        return float(loss)

    def _loss_of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs, labels = (batch[column] for column in self._columns)
        if self._kind == "gpt":
            return model(inputs, labels)["loss"]
        return nn.functional.cross_entropy(model(inputs), labels)


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=256, sequence_length=32, width=128, layers=4, heads=4))


def train(setting: Setting, make: Callable[[], nn.Module]) -> Curve:
    task = Task(setting.kind, make, setting.seed)
    model = task.model
    if setting.kind == "gpt":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    rate = float(optimizer.param_groups[0]["lr"])
    options = Options(overlap=setting.mode == "partial", plan=setting.plan)
    sync = isthmus.sync.attach(model, optimizer, mode=setting.mode, period=PERIOD, options=options)
    steps: list[int] = []
    losses: list[float] = []
    divergences: list[float] = []
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP if setting.kind == "gpt" else 1.0)
        optimizer.zero_grad()
        task.loss(model, step, setting.batch).backward()
        sync.step()
        if (step + 1) % setting.eval_every == 0:
            # In the middle of a period: at its end local SGD's workers are together.
            sync.wait()
            loss, divergence = of_mean(task, model)
            steps.append(step + 1)
            losses.append(loss)
            divergences.append(divergence)
    sent_bytes = sync.statistics().sent_bytes
    sync.close()
    return Curve(
        setting=msgspec.structs.replace(setting, plan=None),
        steps=steps,
        loss=losses,
        divergence=divergences,
        sent_bytes=sent_bytes,
    )


@torch.no_grad()
def of_mean(task: Task, model: nn.Module) -> tuple[float, float]:
    """Held-out loss and divergence of the mean of all workers' models, which keep theirs."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    own = [t.clone() for t in tensors]
    for tensor in tensors:
        tensor.div_(dist.get_world_size())
        dist.all_reduce(tensor)
    count = len(list(model.parameters()))
    apart = sum(
        ((a - b).double().square().sum() for a, b in zip(own[:count], tensors[:count], strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    dist.all_reduce(apart)
    loss = task.held_out(model) if dist.get_rank() == 0 else 0.0
    for tensor, before in zip(tensors, own, strict=True):
        tensor.copy_(before)
    return loss, float(apart) / dist.get_world_size()
