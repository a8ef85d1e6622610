"""One worker of the runs: `replica.py RANK WORKERS STORE FILE`. Worker 0 prints an `Outcome` per line."""

from __future__ import annotations

import datetime
import math
import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import isthmus.sync
from isthmus.data import Dataset, DataSpec, SampleOrder, load_dataset
from isthmus.models.gpt import GPT, GPTConfig
from isthmus.plan import Packing
from isthmus.sync import Options
from isthmus.training.compression import codec_of

LENGTH = 64
MODEL = GPTConfig(vocab_size=256, sequence_length=LENGTH, width=32, layers=2, heads=4)
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": LENGTH, "max_bytes": 8_000_000})
COLUMNS = ["input_ids", "labels"]
BATCH = 32
"""Sequences of one worker in a step."""
HELD_OUT = 512
WARM_UP = 0.1
"""Share of the steps in which the rate grows; then it falls to 0 along a cosine."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """How workers exchange what they have learnt."""

    period: int
    """Steps between exchanges of deltas; with 1, gradients are averaged in each step."""
    rate: float
    """Of AdamW, at its highest."""
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
        return f"deltas every {self.period}, {packed.removesuffix(' 1')}{decay}"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    method: Method
    seed: int
    steps: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    setting: Setting
    loss: float
    """Held out, of the common parameters after the last exchange."""
    parameters: int
    sent_bytes: int
    """By one worker over its links; gradients count as bfloat16."""


def train(setting: Setting) -> Outcome:
    method = setting.method
    data = load_dataset(DATA, "train")
    order = SampleOrder(len(data), setting.seed)
    torch.manual_seed(setting.seed)
    model = GPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=method.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, setting.steps))
    sync = isthmus.sync.attach(
        model, optimizer, mode="every-step" if method.period == 1 else "outer", period=method.period,
        codec=None if method.packing is None else codec_of(method.packing),
        options=Options(
            outer_rate=method.outer_rate, outer_momentum=method.outer_momentum, error_decay=method.error_decay
        ),
    )  # fmt: skip
    for step in range(setting.steps):
        place = (step * dist.get_world_size() + dist.get_rank()) * BATCH
        optimizer.zero_grad()
        model(**data.batch(order.indices(place, BATCH), COLUMNS))["loss"].backward()
        sync.step()
        schedule.step()
    sent_bytes = sync.statistics().sent_bytes
    sync.close()
    return Outcome(
        setting=setting, loss=held_out_loss(model) if dist.get_rank() == 0 else math.nan,
        parameters=sum(p.numel() for p in model.parameters()),
        sent_bytes=sent_bytes // 2 if method.period == 1 else sent_bytes,
    )  # fmt: skip


def factor(step: int, steps: int) -> float:
    """Of the rate: up along a line, down along a cosine that ends at 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    data: Dataset = load_dataset(DATA, "heldout")
    losses = [float(model(**data.batch(range(k, k + 64), COLUMNS))["loss"]) for k in range(0, HELD_OUT, 64)]
    return sum(losses) / len(losses)


def main() -> None:
    rank, workers, store, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, workers), rank=rank, world_size=workers,
        timeout=datetime.timedelta(minutes=10),
    )  # fmt: skip
    for setting in msgspec.json.decode(file.read_bytes(), type=list[Setting]):
        outcome = train(setting)
        if rank == 0:
            print(msgspec.json.encode(outcome).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
