"""Random graphs of ten operators, trained three steps by both engines of a stage, are the same to `CLOSE`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.training.engine import EngineConfig
from isthmus.training.optim import OptimizerConfig

pytest.importorskip("jax", reason="the extra jax")
from tests.tiers import THOROUGH

from isthmus.training.jax.program import jax_program, without_entry

pytestmark = pytest.mark.thorough

CLOSE = 1e-5
"""Of losses, and of weights by their norm."""
COLUMNS = {"x": ColumnSpec(dtype="float32", shape=(4, 8)), "y": ColumnSpec(dtype="int64", limit=4)}
SAME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: torch.add(a, b, alpha=0.5),
    "rsub": lambda a, b: torch.rsub(a, b, alpha=2) / 2,
    "mul": lambda a, b: a * b.tanh(),
    "div": lambda a, b: a / (1 + b * b),
    "abs": lambda a, b: a.abs() - 0.5,
    "clamp": lambda a, b: a.clamp(-0.5, 0.75) + b,
    "relu": lambda a, b: F.relu(a),
    "leaky": lambda a, b: F.leaky_relu(a, 0.2),
    "hard": lambda a, b: F.hardswish(a) + F.hardtanh(b),
    "elu": lambda a, b: F.elu(a, 0.7),
    "gelu": lambda a, b: F.gelu(a, approximate="tanh"),
    "silu": lambda a, b: F.silu(a) + F.mish(b),
    "softplus": lambda a, b: F.softplus(a, 2) - F.logsigmoid(b),
    "largest": lambda a, b: torch.maximum(a, b),
    "where": lambda a, b: torch.where(a > b, a, 0.5 * b),
    "masked": lambda a, b: a.masked_fill(b < 0, -1.0),
    "softmax": lambda a, b: a.softmax(-1) + b,
    "log_softmax": lambda a, b: a.log_softmax(1) * 0.2,
    "normalize": lambda a, b: F.normalize(F.relu(a), dim=-1),
    "norms": lambda a, b: a / (1 + b.norm(1, -1, keepdim=True) + b.norm(float("inf"), 1, keepdim=True)),
    "spread": lambda a, b: (a - a.mean(-1, keepdim=True)) / (a.std(-1, keepdim=True) + 0.1),
    "most": lambda a, b: a - b.amax(-1, keepdim=True) + F.relu(b).max(1, keepdim=True).values,
    "prod": lambda a, b: a + F.relu(b).clamp(max=1).prod(1, keepdim=True),
    "cumsum": lambda a, b: a.cumsum(-1) / 8,
    "logsumexp": lambda a, b: a - b.logsumexp(-1, keepdim=True),
    "power": lambda a, b: (a.abs() + 0.1) ** 1.5 - torch.sqrt(b * b + 0.01),
    "remainder": lambda a, b: torch.remainder(a, 1.5) + b.floor() * 0.1,
    "lerp": lambda a, b: torch.lerp(a, b, 0.7),
    "split": lambda a, b: torch.cat([b.chunk(2, -1)[1], a.chunk(2, -1)[0]], -1),
    "turn": lambda a, b: torch.roll(a.flip(1), 3, -1),
    "product": lambda a, b: (a @ b.transpose(1, 2)).softmax(-1) @ b,
    "attend": lambda a, b: F.scaled_dot_product_attention(a, b, b, is_causal=True),
    "unseen": lambda a, b: F.scaled_dot_product_attention(a, b, a, (b[..., :4] > 0.5)),
    "pool": lambda a, b: F.avg_pool1d(a, 3, 1, 1) + F.max_pool1d(F.relu(b), 3, 1, 1),
    "pick": lambda a, b: a[:, torch.tensor([0, 2, 2, 1])] + b.sort(-1).values,
    "gather": lambda a, b: a + b.gather(1, b.argmax(1, keepdim=True)),
    "layer_norm": lambda a, b: F.layer_norm(a, [8]) + F.rms_norm(b, [8]),
    "group_norm": lambda a, b: F.group_norm(a, 2),
    "detach": lambda a, b: a * b.detach().sigmoid(),
    "triangle": lambda a, b: a + b.tril(1),
}
LOSSES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda a, y, one: F.cross_entropy(a.mean(-1), y, label_smoothing=0.1),
    lambda a, y, one: F.cross_entropy(a, y[:, None].expand(-1, 8), ignore_index=1, reduction="sum") / 16,
    lambda a, y, one: F.mse_loss(a.sum(-1).tanh(), one),
    lambda a, y, one: F.l1_loss(a.amax(-1), one),
    lambda a, y, one: F.smooth_l1_loss(a.mean(-1), one, beta=0.5),
    lambda a, y, one: F.binary_cross_entropy_with_logits(a.mean(-1), one),
)
GRAPHS = 10 if THOROUGH else 3
"""In a module, each with its own weights: what is traced and compiled once is cheaper."""


class Graphs(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = random.Random(seed)
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(GRAPHS))
        self.rows = nn.Parameter(torch.randn(GRAPHS, 4, 8))
        self.register_buffer("unit", torch.eye(4))
        self.plans: Any = [
            ([(draws.choice(list(SAME)), draws.random(), draws.random()) for _ in range(10)], draws.choice(LOSSES))
            for _ in range(GRAPHS)
        ]

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        losses = []
        for number, (steps, loss) in enumerate(self.plans):
            values = [self.first[number](x), x + self.rows[number]]
            for name, left, right in steps:
                values.append(
                    SAME[name](values[-1 - int(left * min(3, len(values)))], values[int(right * len(values))])
                )
            losses.append(loss(values[-1], y, self.unit[y]))
        return {"loss": torch.stack(losses).sum(), "losses": torch.stack(losses)}


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly() -> Iterator[None]:
    config = importlib.import_module("jax").config
    config.update("jax_disable_most_optimizations", True)
    yield
    config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("seed", range(20 if THOROUGH else 1))
@pytest.mark.long
def test_random_graphs_train_alike(seed: int) -> None:
    config = EngineConfig(
        micro_batches=1, micro_batch_size=2, steps=3, optimizers=(OptimizerConfig(name="sgd", lr=0.05),)
    )

    def build() -> nn.Module:
        return Graphs(seed)

    captured = capture_of(build, COLUMNS)
    plain, other = (Pipeline(captured, [], weights_of(build, captured), config) for _ in range(2))
    (engine,) = other.engines
    engine.program = jax_program(engine.eager)
    assert without_entry(engine.eager) == ()
    for step in range(3):
        data = batches(COLUMNS, 1, 2, step)
        (expected, _), (loss, _) = plain.step(step, copies(data)), other.step(step, copies(data))
        assert loss == pytest.approx(expected, rel=CLOSE)
        plain.update(step)
        other.update(step)
    for name, value in plain.state().items():
        found = other.state()[name]
        assert (found - value).norm() <= CLOSE * value.norm(), name
    assert all(torch.isfinite(value).all() for value in plain.state().values())
