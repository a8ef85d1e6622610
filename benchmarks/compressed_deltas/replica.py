"""One worker of the runs: `replica.py RANK WORKERS STORE FILE`. Worker 0 prints an `Outcome` per line.

    steps        0 ............ START ............ STEPS
    exchanged      gradients      as the method says
    rate         / warm up, then along a cosine to 0  \\
"""

from __future__ import annotations

import copy
import datetime
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import isthmus.sync
from isthmus.data import DataSpec, SampleOrder, load_dataset
from isthmus.models import GPT, GPTConfig
from isthmus.plans import Packing
from isthmus.sync import Options, Sync
from isthmus.training.compression import codec_of

LENGTH = 32
MODEL = GPTConfig(vocab_size=256, sequence_length=LENGTH, width=32, layers=1, heads=4)
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": LENGTH, "max_bytes": 8_000_000})
COLUMNS = ["input_ids", "labels"]
BATCH = 256
"""Sequences of all workers in a step."""
HELD_OUT = 1024
WARM_UP_STEPS = 90
START_RATE = 0.048
"""Of AdamW in the steps before the start, at its highest."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """How workers exchange what they have learnt."""

    period: int
    """Steps between exchanges of deltas; with 1, gradients are averaged in each step."""
    rate: float
    """Of AdamW; a cosine that is at its highest after warming up falls from there."""
    packing: Packing | None = None
    """Of the deltas; None for float32."""
    error_decay: float = 1.0
    outer_rate: float = 1.0
    outer_momentum: float = 0.0

    @property
    def name(self) -> str:
        if self.period == 1:
            return "gradients, bf16"
        packed = "float32" if self.packing is None else f"{self.packing.codec} {self.packing.ratio:g}"
        decay = "" if self.error_decay == 1 else f", decay {self.error_decay:g}"
        return f"deltas every {self.period}, {packed}{decay}"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    method: Method
    seed: int
    start: int
    """Steps with gradients averaged in each before the method begins; 0 for none."""
    steps: int
    """In all."""
    workers: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    setting: Setting
    loss: float
    """Held out, of the common parameters after the last exchange."""
    parameters: int
    sent_bytes: int
    """By one worker over its links since the start; gradients count as bfloat16."""


@dataclass
class Training:
    """A model on its way."""

    model: GPT
    optimizer: torch.optim.AdamW


class Trainer:
    """Runs of one worker. What precedes a start is computed once for each seed."""

    def __init__(self) -> None:
        self._data = load_dataset(DATA, "train")
        self._started: dict[tuple[int, int, int], Training] = {}

    def outcome(self, setting: Setting) -> Outcome:
        method = setting.method
        training = self._start(setting)
        outer = Options(
            outer_rate=method.outer_rate, outer_momentum=method.outer_momentum, error_decay=method.error_decay
        )
        mode, options = ("every-step", Options()) if method.period == 1 else ("outer", outer)
        sync = isthmus.sync.attach(
            training.model,
            training.optimizer,
            mode=mode,
            period=method.period,
            options=options,
            codec=None if method.packing is None else codec_of(method.packing),
        )
        self._train(training, sync, setting, range(setting.start, setting.steps), method.rate)
        sent_bytes = sync.statistics().sent_bytes
        sync.close()
        return Outcome(
            setting=setting,
            loss=held_out_loss(training.model) if dist.get_rank() == 0 else math.nan,
            parameters=sum(p.numel() for p in training.model.parameters()),
            sent_bytes=sent_bytes // 2 if method.period == 1 else sent_bytes,
        )

    def _start(self, setting: Setting) -> Training:
        key = setting.seed, setting.start, setting.steps
        if key not in self._started:
            torch.manual_seed(setting.seed)
            model = GPT(MODEL)
            made = Training(model, adamw(model))
            sync = isthmus.sync.attach(made.model, made.optimizer, mode="every-step")
            self._train(made, sync, setting, range(setting.start), START_RATE)
            sync.close()
            self._started[key] = made
        # Not a copy of the whole: parameters that `attach` has moved share one memory.
        kept = self._started[key]
        model = GPT(MODEL)
        model.load_state_dict(kept.model.state_dict())
        optimizer = adamw(model)
        optimizer.load_state_dict(copy.deepcopy(kept.optimizer.state_dict()))
        return Training(model, optimizer)

    def _train(self, training: Training, sync: Sync, setting: Setting, steps: range, rate: float) -> None:
        order = SampleOrder(len(self._data), setting.seed)
        own = BATCH // dist.get_world_size()
        for step in steps:
            for group in training.optimizer.param_groups:
                group["lr"] = rate * factor(step, setting.steps)
            training.optimizer.zero_grad()
            batch = self._data.batch(order.indices(step * BATCH + dist.get_rank() * own, own), COLUMNS)
            training.model(**batch)["loss"].backward()
            sync.step()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def factor(step: int, steps: int) -> float:
    """Of the rate: up along a line, down along a cosine that ends at 0."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)))


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    data = load_dataset(DATA, "heldout")
    losses = [float(model(**data.batch(range(k, k + 128), COLUMNS))["loss"]) for k in range(0, HELD_OUT, 128)]
    return sum(losses) / len(losses)


def main() -> None:
    rank, workers, store, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, workers),
        rank=rank,
        world_size=workers,
        timeout=datetime.timedelta(minutes=10),
    )
    trainer = Trainer()
    for setting in msgspec.json.decode(file.read_bytes(), type=list[Setting]):
        outcome = trainer.outcome(setting)
        if rank == 0:
            print(msgspec.json.encode(outcome).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
