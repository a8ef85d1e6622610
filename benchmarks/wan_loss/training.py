"""A training in this process with the numbers of the plan: boundary, codec and delay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import torch
from step_times import plan_of
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from twin import DATA, MICRO_BATCH_SIZE, MICRO_BATCHES, Variant

from isthmus.data import SampleOrder, load_dataset
from isthmus.models import Bottleneck, build_model
from isthmus.plans import Compression, Edge
from isthmus.training.compression import codec_of

LEARNING_RATE, DELAYED_RATE, WARMUP = 2e-3, 1e-3, 20
"""With a delay AdamW does not learn at 2e-3: a loss of 3.34 after 120 steps, where 2.83 is the dense model's."""
HELD_OUT = 256
"""Samples."""
LARGEST_TILE = 256
"""Of the dense codecs: int8's, and a multiple of the others'."""
Columns = dict[str, Tensor]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    variant: str
    seed: int
    steps: int
    every: int
    """Steps between two losses of the curve."""
    curve: tuple[float, ...]
    """Held-out loss, nats per byte, of the model without codecs. It ends where the training diverged."""
    trained_s: float

    @property
    def final(self) -> float:
        """The loss after all steps; NaN where it diverged before."""
        return self.curve[-1] if len(self.curve) == self.steps // self.every else math.nan


class _Crossing(torch.autograd.Function):
    """A link: the value there and its gradient back, packed."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, edge: Edge) -> Tensor:
        ctx.edge = edge  # pyright: ignore[reportAttributeAccessIssue]
        return _crossed(value, edge.forward_compression)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        edge: Edge = ctx.edge  # pyright: ignore[reportAttributeAccessIssue]
        return _crossed(gradients[0], edge.backward_compression), None


def _crossed(value: Tensor, packed: Compression | None) -> Tensor:
    """As it is sent, a micro-batch by itself; all at once where each is a whole number of tiles of any dense codec."""
    if packed is None:
        return value
    codec = codec_of(packed.packing)
    whole = codec.name != "topk" and value[:MICRO_BATCH_SIZE].numel() % LARGEST_TILE == 0
    parts = [value] if whole else value.split(MICRO_BATCH_SIZE)
    return torch.cat([codec.decode(codec.encode(p), p.shape, p.dtype) for p in parts])


def train(variant: Variant, seed: int, steps: int, every: int) -> Trained:
    torch.manual_seed(seed)
    module, started = build_model(variant.model), time.perf_counter()
    if variant.compression:
        for edge in plan_of(variant).replica.edges:
            _pack(module.get_submodule(f"blocks.{edge.source}"), edge)
    optimizers = _optimizers(module, variant.optimizer)
    take_gradients = _Delay(module) if variant.delayed else lambda run: run()
    learning_rate = DELAYED_RATE if variant.delayed else LEARNING_RATE
    data, others = load_dataset(DATA, "train"), load_dataset(DATA, "heldout")
    columns, batch = ["input_ids", "labels"], MICRO_BATCHES * MICRO_BATCH_SIZE
    held_out, order = others.batch(range(HELD_OUT), columns), SampleOrder(len(data), seed, True)
    curve: list[float] = []
    for step in range(steps):
        samples = data.batch(order.indices(step * batch, batch), columns)
        take_gradients(lambda samples=samples: _gradients(module, samples))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, (step + 1) / WARMUP)
            optimizer.step()
        if (step + 1) % every == 0:
            loss = _loss(module, held_out)
            if not math.isfinite(loss):
                break
            curve.append(loss)
    return Trained(
        variant=variant.name,
        seed=seed,
        steps=steps,
        every=every,
        curve=tuple(curve),
        trained_s=time.perf_counter() - started,
    )


def _gradients(module: nn.Module, samples: Columns) -> None:
    module.zero_grad()
    module(**samples)["loss"].backward()


class _Delay:
    """Gradients at the weights of the step before, for an update of the newest (PipeDream-2BW)."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._before = [p.detach().clone() for p in self._parameters]

    def __call__(self, run: Callable[[], None]) -> None:
        newest = [p.detach().clone() for p in self._parameters]
        self._load(self._before)
        run()
        self._load(newest)
        self._before = newest

    @torch.no_grad()
    def _load(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def _pack(block: nn.Module, edge: Edge) -> None:
    """What leaves the block crosses the edge; of a bottleneck behind it, what is narrow."""

    def cross(value: Tensor) -> Tensor:
        return _Crossing.apply(value, edge) if block.training else value  # pyright: ignore[reportReturnType]

    if isinstance(bottleneck := getattr(block, "boundary", None), Bottleneck):
        bottleneck.forward = lambda hidden: bottleneck.widened(cross(bottleneck.narrowed(hidden)))
    else:
        block.register_forward_hook(lambda _block, _given, found: cross(cast("Tensor", found)))


def _optimizers(module: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks and AdamW for the rest, or AdamW for all."""
    matrices = [p for n, p in module.named_parameters() if name == "muon" and n.startswith("blocks.") and p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in module.parameters() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, weight_decay=0.01)]
    if matrices:
        found.append(torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found


@torch.no_grad()
def _loss(module: nn.Module, samples: Columns) -> float:
    module.eval()
    loss = module(**samples)["loss"].item()
    module.train()
    return loss
