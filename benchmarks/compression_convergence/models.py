"""The two models, their jobs and their fleet: four stages, one slow link in the middle."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from isthmus.data import DataSpec
from isthmus.experiments import LearningRate, OptimizerConfig
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.job import Job, TrainingConfig
from isthmus.models import ModelSpec

FAST, SLOW = Link(0.001, 1e9 / 8), Link(0.02, 5e6 / 8)
STAGES = 4
METHODS = ("dense", "int8", "just-enough", "adatopk", "uniform")
REMEMBERED = ("adatopk, feedback", "uniform, feedback")
"""What is left out of a sample's gradients follows in the next pass."""
ONE_WAY = ("uniform, gradients", "uniform, gradients, feedback")
"""Values travel as they are."""


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.shortcut = None if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return functional.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """ResNet-18's eight blocks on 8 x 8 digits, a quarter as wide."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        inner, blocks = width, list[nn.Module]()
        for outer in widths:
            blocks += [Block(inner, outer, 1 if inner == outer else 2), Block(outer, outer, 1)]
            inner = outer
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inner, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(pixel_values)))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: ModelSpec
    data: DataSpec
    steps: int
    batch_size: int
    micro_batches: int
    lr: float
    methods: tuple[str, ...] = METHODS
    flops_per_s: float
    """Of each device: so slow that a stage takes a few times longer than a fast link."""

    def job(self, seed: int, steps: int) -> Job:
        training = TrainingConfig(
            steps=steps,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            seed=seed,
            eval_every=steps,
            eval_samples=256,
        )
        return Job(
            name=self.name,
            model=self.model,
            data=self.data,
            training=training,
            optimizer=(OptimizerConfig(name="adamw", lr=self.lr),),
            learning_rate=LearningRate(schedule="cosine", warmup_steps=steps // 10),
        )

    def fleet(self) -> Fleet:
        devices = tuple(
            Device(name=f"d{k}", region="west" if k < 2 else "east", flops_per_s=self.flops_per_s, memory_bytes=1 << 32)
            for k in range(STAGES)
        )
        return Fleet(name="two sites", devices=devices, links=Links(default=SLOW, intra=FAST))


GPT = ModelSpec(name="gpt", options={"vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 4, "heads": 4})


def text(max_bytes: int) -> DataSpec:
    return DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": max_bytes})


CASES = (
    Case(
        name="ResNet",
        model=ModelSpec(name="models:ResNet"),
        data=DataSpec(kind="digits"),
        steps=100,
        batch_size=64,
        micro_batches=8,
        lr=3e-3,
        methods=METHODS + REMEMBERED + ONE_WAY,
        flops_per_s=1e10,
    ),
    Case(
        name="GPT",
        model=GPT,
        data=text(2_000_000),
        steps=120,
        batch_size=32,
        micro_batches=8,
        lr=3e-3,
        flops_per_s=1e10,
    ),
    Case(
        name="GPT, again",
        model=GPT,
        data=text(50_000),
        steps=120,
        batch_size=32,
        micro_batches=8,
        lr=3e-3,
        methods=("dense", "adatopk", "uniform", *REMEMBERED, *ONE_WAY),
        flops_per_s=1e10,
    ),
)
