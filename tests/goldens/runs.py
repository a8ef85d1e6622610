"""Losses and weights of short runs over real processes: pipelines, replicas in every kind of mode, federated rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from isthmus import Run
from isthmus.cost import SyncPolicy
from isthmus.experiments import Watcher
from isthmus.federated.algorithms import algorithm_names
from isthmus.job import Job, prepare
from isthmus.planners import scheduled
from isthmus.protocol import Item
from tests.federated.test_federated_runs import write
from tests.runtime.commands import isthmus
from tests.runtime.jobs import TEXT, final_weights, fleet_of, job_of, random_cut
from tests.runtime.jobs import run as run_pipeline
from tests.runtime.test_replicated_runs import GPT, planned
from tests.runtime.test_replicated_runs import run as run_replicas

SCHEMES = ("sp", "rw", "sd", "fa", "parrot", "ours")
POLICIES = {
    "local": SyncPolicy(mode="local", period=2),
    "partial": SyncPolicy(mode="partial", period=2),
    "dream": SyncPolicy(mode="dream", period=2),
    "outer": SyncPolicy(mode="outer", period=2),
    "streaming": SyncPolicy(mode="streaming", period=2, delay=1),
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run: what it told, and its weights in a few figures and as a hash of their bits."""

    losses: list[float]
    norm: float
    """Of all weights as one vector."""
    bits: str


class Case(Protocol):
    def __call__(self, folder: Path) -> Result: ...


def result(losses: list[float], weights: Mapping[str, Tensor]) -> Result:
    bits, squares = hashlib.sha256(), 0.0
    for name in sorted(weights):
        value = weights[name].detach().contiguous()
        bits.update(name.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
        squares += value.double().square().sum().item()
    return Result(losses=losses, norm=squares**0.5, bits=bits.hexdigest())


def gpt(**training: object) -> Job:
    return job_of("gpt", GPT, TEXT, **{"steps": 4, "save_every": 4, **training})


def pipeline(folder: Path, *, stages: int, **training: object) -> Result:
    losses: list[float] = []

    def advanced(item: Item, loss: float | None, spans: object) -> None:
        if item.kind == "train" and loss is not None:
            losses.append(loss)

    prepared = prepare(gpt(clip_norm=1.0, **training))
    run_pipeline(prepared, random_cut(prepared, stages, 1), folder, watcher=Watcher(advanced=advanced))
    return result(losses, final_weights(folder))


def replicas(folder: Path, *, policy: SyncPolicy) -> Result:
    prepared = prepare(msgspec.structs.replace(gpt(), sync=policy))
    plan = scheduled(prepared.problem(fleet_of(3)), planned(prepared, [((0.5,), 2), ((), 2)]))
    _, losses = run_replicas(prepared, plan, folder)
    return result(losses, final_weights(folder))


def federated(folder: Path, *, algorithm: str, scheme: str) -> Result:
    changes = [('"scaffold"', f'"{algorithm}"'), ("executors = 2", f'executors = 2\nscheme = "{scheme}"')]
    done = isthmus("train", write(folder, *changes))
    assert done.code == 0, done
    (run,) = (folder / "runs").iterdir()
    found = Run(run)
    return result([line.evaluation.loss for line in found.rounds if line.evaluation], found.model.state_dict())


CASES: dict[str, Case] = {
    "pipeline": partial(pipeline, stages=3),
    "pipeline-bf16": partial(pipeline, stages=2, precision="bf16"),
    **{f"replicas-{name}": partial(replicas, policy=policy) for name, policy in POLICIES.items()},
    **{
        f"federated-{name}": partial(federated, algorithm=name, scheme=SCHEMES[number % len(SCHEMES)])
        for number, name in enumerate(sorted(algorithm_names()))
    },
}
