"""Replicas that exchange compressed deltas now and then, against gradients averaged in every step.

`python benchmarks/compressed_deltas/run.py [--quick] [--json PATH]`

Four replicas of a GPT on Python's standard library in one process, the same tokens for everyone. Deltas are sent by
the SparseLoCo recipe: H inner AdamW steps, the difference to the last common parameters added to what earlier payloads
left out, packed, averaged, and applied as it is. Bytes are what one replica hands to its collective; held-out losses
are of the common parameters. Ends with 1 where sparse2bit does not send a hundred times less than bfloat16 gradients.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from isthmus.data import Dataset, DataSpec, SampleOrder, load_dataset
from isthmus.models import ModelSpec, build_model
from isthmus.training.compression import Bf16, Codec, ErrorFeedback, Sparse2Bit
from isthmus.training.optim import LearningRate

LATEST = Path(__file__).parent / "results" / "latest.json"
MODEL = ModelSpec(name="gpt", options={
    "vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 2, "heads": 4
})  # fmt: skip
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 2_000_000})
REPLICAS, BATCH, STEPS, LR, CLIP_NORM = 4, 8, 240, 2e-3, 1.0
SEEDS = (0, 1, 2)
HELD_OUT, COLUMNS = 256, ("input_ids", "labels")
LEAST_SAVING = 100.0


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Every `period` steps; a period of 1 averages gradients."""

    name: str
    period: int
    codec: Codec
    decay: float = 1.0
    """Share of an error that the next payload gets."""
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    """Nesterov SGD on the mean delta."""
    rate: float = LR
    """Of AdamW, at its highest."""


METHODS = (
    Method(name="gradients, bf16", period=1, codec=Bf16()),
    Method(name="deltas every 8, bf16", period=8, codec=Bf16()),
    Method(name="deltas every 8, sparse2bit 8", period=8, codec=Sparse2Bit(8.0)),
    Method(name="deltas every 2, bf16", period=2, codec=Bf16()),
    Method(name="deltas every 2, sparse2bit 32", period=2, codec=Sparse2Bit(32.0)),
    Method(name="deltas every 2, sparse2bit 32, decay 0.95", period=2, codec=Sparse2Bit(32.0), decay=0.95),
)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    losses: tuple[float, ...]
    """Held-out, by seed."""
    sent_bytes: int
    """By one replica, in all steps."""
    saving: float
    """Bytes of bfloat16 gradients in every step, over these."""
    gap: float
    """Of the mean loss, against gradients in every step, relative."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    replicas: int
    steps: int
    parameters: int
    results: tuple[Result, ...]

    @property
    def good(self) -> bool:
        return all(r.saving >= LEAST_SAVING for r in self.results if "sparse2bit" in r.method)


class Replica:
    """A model, its optimizer, its part of the data, and what its payloads have left out so far."""

    def __init__(self, method: Method, seed: int, number: int, steps: int, data: Dataset) -> None:
        torch.manual_seed(seed)
        self.module = build_model(MODEL)
        self.feedback = ErrorFeedback(method.codec, method.decay)
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=method.rate)
        rate = LearningRate(schedule="cosine", warmup_steps=steps // 10)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda s: rate.factor(s, steps))
        self._number, self._data, self._order = number, data, SampleOrder(len(data), seed, True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def differentiate(self, step: int) -> None:
        start = (step * REPLICAS + self._number) * BATCH
        batch = self._data.batch(self._order.indices(start, BATCH), list(COLUMNS))
        self._optimizer.zero_grad()
        self.module(**batch)["loss"].backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._schedule.step()


def exchanged(
    replicas: Sequence[Replica], tensors: Sequence[Mapping[str, Tensor]], codec: Codec
) -> tuple[dict[str, Tensor], int]:
    """The mean of what all replicas' payloads say, and the bytes of one replica's."""
    means: dict[str, Tensor] = {}
    sent_bytes = 0
    for name, first in tensors[0].items():
        payloads = [r.feedback.encode(name, t[name], name) for r, t in zip(replicas, tensors, strict=True)]
        decoded = [codec.decode(p, first.shape, first.dtype, name) for p in payloads]
        means[name] = torch.stack(decoded).mean(0)
        sent_bytes += payloads[0].numel()
    return means, sent_bytes


def train(method: Method, seed: int, steps: int) -> tuple[float, int]:
    """(held-out loss, bytes that one replica sent)."""
    data = load_dataset(DATA, "train")
    replicas = [Replica(method, seed, k, steps, data) for k in range(REPLICAS)]
    common = {name: nn.Parameter(p.detach().clone()) for name, p in replicas[0].parameters.items()}
    outer = torch.optim.SGD(
        common.values(), method.outer_rate, method.outer_momentum, nesterov=method.outer_momentum > 0
    )  # fmt: skip
    sent_bytes = 0
    for step in range(steps):
        for replica in replicas:
            replica.differentiate(step)
        if method.period == 1:
            gradients = [{n: p.grad for n, p in r.parameters.items() if p.grad is not None} for r in replicas]
            means, size = exchanged(replicas, gradients, method.codec)
            sent_bytes += size
            for replica in replicas:
                for name, parameter in replica.parameters.items():
                    parameter.grad = means[name].clone()
        for replica in replicas:
            replica.update()
        if method.period > 1 and ((step + 1) % method.period == 0 or step + 1 == steps):
            deltas = [{n: common[n].detach() - p.detach() for n, p in r.parameters.items()} for r in replicas]
            means, size = exchanged(replicas, deltas, method.codec)
            sent_bytes += size
            for name, value in common.items():
                value.grad = means[name]
            outer.step()
            for replica in replicas:
                for name, parameter in replica.parameters.items():
                    parameter.data.copy_(common[name])
    return held_out_loss(replicas[0].module), sent_bytes


def held_out_loss(module: nn.Module) -> float:
    data = load_dataset(DATA, "heldout")
    with torch.no_grad():
        losses = [
            float(module(**data.batch(range(k, k + 32), list(COLUMNS)))["loss"]) for k in range(0, HELD_OUT, 32)
        ]
    return statistics.fmean(losses)


def table(found: Report) -> Table:
    title = f"{found.replicas} replicas, {found.parameters:,} parameters, {found.steps} steps"
    drawn = Table("exchange", title=title)
    for heading in ("bytes a replica", "fewer than bf16 gradients", "held-out loss", "gap"):
        drawn.add_column(heading, justify="right")
    for r in found.results:
        drawn.add_row(
            r.method, f"{r.sent_bytes:,}", f"{r.saving:.0f}x",
            f"{statistics.fmean(r.losses):.4f} +- {statistics.pstdev(r.losses):.4f}", f"{r.gap:+.2%}",
        )  # fmt: skip
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument("--json", type=Path, default=LATEST, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (STEPS // 10, SEEDS[:1]) if options.quick else (STEPS, SEEDS)
    parameters = sum(p.numel() for p in build_model(MODEL).parameters())
    every_step_bytes, results = 2 * parameters * steps, list[Result]()
    for method in METHODS:
        told = [train(method, seed, steps) for seed in seeds]
        losses, sent_bytes = tuple(loss for loss, _ in told), told[0][1]
        print(f"{method.name}: {losses}", file=sys.stderr)
        base = statistics.fmean(results[0].losses if results else losses)
        results.append(Result(
            method=method.name, losses=losses, sent_bytes=sent_bytes, saving=every_step_bytes / sent_bytes,
            gap=statistics.fmean(losses) / base - 1,
        ))  # fmt: skip
    found = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", replicas=REPLICAS, steps=steps,
        parameters=parameters, results=tuple(results),
    )  # fmt: skip
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    Console(width=120).print(table(found))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
