"""Captured models for planning problems: transformers tied and not, networks with skips, and two towers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np
import transformers
from torch import Tensor, cat, nn

from isthmus.cost import Problem
from isthmus.cost.blocks import Blocks
from isthmus.fleet import Fleet, Link, Links, Route
from isthmus.graph import Flow
from isthmus.graph.capture import capture
from isthmus.graph.captured import Column
from isthmus.models import GPT, GPTConfig, UNet, UNetConfig


class Towers(nn.Module):
    """Two inputs, each through layers of its own, and what joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(*self._layers()) for _ in range(2))
        self.joined = nn.Linear(128, 10)

    @staticmethod
    def _layers() -> Iterator[nn.Module]:
        for _ in range(6):
            yield from (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> Tensor:
        found = self.joined(cat([self.left(left), self.right(right)], -1))
        return nn.functional.cross_entropy(found, labels)


class Llama(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            tie_word_embeddings=tied,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.ResNetConfig(
            num_channels=1, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], layer_type="basic"
        )
        config.num_labels = 10
        self.model = transformers.ResNetForImageClassification(config)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixel_values=pixel_values).logits, labels)


@cache
def captured(name: str) -> Flow:
    tokens = {"input_ids": Column("int64", (64,)), "labels": Column("int64", (64,))}
    image = {"pixel_values": Column("float32", (1, 32, 32)), "labels": Column("int64", ())}
    pixels = image | {"labels": Column("int64", (32, 32))}
    pair = {"left": Column("float32", (64,)), "right": Column("float32", (64,)), "labels": Column("int64", ())}
    sizes = GPTConfig(vocab_size=128, sequence_length=64, layers=4, width=64, tie_embedding=name == "tied gpt")
    build, columns = {
        "gpt": (lambda: GPT(sizes), tokens),
        "tied gpt": (lambda: GPT(sizes), tokens),
        "llama": (lambda: Llama(tied=False), tokens),
        "tied llama": (lambda: Llama(tied=True), tokens),
        "resnet": (ResNet, image),
        "unet": (lambda: UNet(UNetConfig()), image),
        "deep gpt": (lambda: GPT(GPTConfig(vocab_size=256, sequence_length=64, layers=6, width=96)), tokens),
        "deep unet": (lambda: UNet(UNetConfig(depth=3, width=8, task="segmentation")), pixels),
        "towers": (Towers, pair),
    }[name]
    return Flow(capture(build, columns, name=name).train)


def with_model(problem: Problem, flow: Flow) -> Problem:
    """Another model on devices and links that are as much faster, and hold as much more, as it needs."""
    wide = msgspec.structs.replace(problem.fleet, region_info=())
    made = Problem(
        flow=flow,
        fleet=wide,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=min(problem.micro_batches, 16),
        schedule=problem.schedule,
        state=problem.state,
    )
    work = made.cumulative_flops[-1] / problem.cumulative_flops[-1]
    sent = [np.median(Blocks(p).live_bytes[1:-2]) for p in (made, problem)]
    kept = [p.cumulative_saved_bytes[-1] + sum(v.owned_bytes for v in Blocks(p).variables) for p in (made, problem)]
    return made.on(scaled(wide, work, float(sent[0] / max(sent[1], 1)), kept[0] / kept[1]))


def scaled(fleet: Fleet, work: float, sent: float, kept: float) -> Fleet:
    def routes(found: tuple[Route, ...]) -> tuple[Route, ...]:
        return tuple(
            Route(r.source, r.target, Link(r.link.latency_s, r.link.bandwidth_bytes_per_s * sent)) for r in found
        )

    def held(size: int) -> int:
        return min(1 << 50, int(size * kept))

    devices = tuple(
        msgspec.structs.replace(d, flops_per_s=d.flops_per_s * work, memory_bytes=held(d.memory_bytes))
        for d in fleet.devices
    )
    links = Links(regions=routes(fleet.links.regions), devices=routes(fleet.links.devices))
    return msgspec.structs.replace(fleet, devices=devices, links=links)
