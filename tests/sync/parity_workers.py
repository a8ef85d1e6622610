"""A small model, its data and its plain loops, for the cases of several workers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import isthmus.sync
from isthmus.sync import Options

STEPS = 13
"""Of several periods."""
BATCH = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(BATCH, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (BATCH,), generator=drawn)


def loss_of(made: nn.Module, step: int, worker: int) -> Tensor:
    inputs, labels = batch(step, worker)
    return nn.functional.cross_entropy(made(inputs), labels)


EACH_STEP = ("every-step", "s-sgd", "asc-wfbp")
"""Modes that average gradients."""

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
}


def one_process(make: Optimizers, workers: int) -> nn.Module:
    """S-SGD: the mean loss over what all workers see."""
    made = model()
    optimizer = make(made)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(made, step, worker) for worker in range(workers)]).mean().backward()
        optimizer.step()
    return made


def by_period(make: Optimizers, workers: int, due: Callable[[int], list[str]]) -> list[nn.Module]:
    """Local SGD, all replicas in one process: after each step the parameters named by `due` are averaged."""
    replicas = [model() for _ in range(workers)]
    optimizers = [make(replica) for replica in replicas]
    for step in range(STEPS):
        for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(replica, step, worker).backward()
            optimizer.step()
        averaged = set(due(step))
        with torch.no_grad():
            for same in zip(*(replica.named_parameters() for replica in replicas), strict=True):
                if same[0][0] in averaged:
                    mean = torch.stack([p for _, p in same]).mean(0)
                    for _, p in same:
                        p.copy_(mean)
    return replicas


def synced(make: Optimizers, mode: str, period: int, options: Options) -> tuple[nn.Module, isthmus.sync.Sync]:
    made = model()
    optimizer = make(made)
    sync = isthmus.sync.attach(made, optimizer, mode=mode, period=period, options=options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(made, step, dist.get_rank()).backward()
        sync.step()
    sync.close()
    return made, sync


def apart(one: nn.Module, other: nn.Module) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
