"""The least that two processes can do: forked workers, longest client first, local sums, shared memory, one pipe each.

No failures, no state, no streams of bytes: what anybody would write for one run, as the bar to reach.
"""
# torch names its list operations as private ones; its own optimizers use them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from bare import Trainer
from task import Rounds, Task, load_weights, weights_of

WORKERS = 2


def views(vector: torch.Tensor, module: torch.nn.Module) -> list[torch.Tensor]:
    parameters = list(module.parameters())
    parts = vector.split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def work(task: Task, start: torch.Tensor, total: torch.Tensor, pipe: Connection) -> None:
    module = task.model()
    trainer = Trainer(task, views(start, module))
    sums = views(total, module)
    for round_ in range(task.rounds):
        weight = sum(map(task.samples, task.cohorts[round_]))
        mine: list[int] = pipe.recv()
        total.zero_()
        for client in mine:
            torch._foreach_add_(sums, trainer.train(round_, client), alpha=task.samples(client) / weight)
        pipe.send(None)


def longest_first(task: Task, cohort: list[int]) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in range(WORKERS)]
    loads = [0] * WORKERS
    for client in sorted(cohort, key=task.samples, reverse=True):
        least = loads.index(min(loads))
        dealt[least].append(client)
        loads[least] += task.samples(client)
    return dealt


def run(task: Task, folder: Path, _: dict[str, int]) -> None:
    module = task.model()
    start = weights_of(module).share_memory_()
    totals = torch.zeros(WORKERS, len(start)).share_memory_()
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    for number in range(WORKERS):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        context.Process(target=work, args=(task, start, totals[number], theirs), daemon=True).start()
    rounds = Rounds()
    for cohort in task.cohorts:
        for pipe, mine in zip(pipes, longest_first(task, cohort), strict=True):
            pipe.send(mine)
        for pipe in pipes:
            pipe.recv()
        torch.sum(totals, 0, out=start)
        rounds.end()
    load_weights(module, start)
    rounds.write(folder, weights_of(module))
