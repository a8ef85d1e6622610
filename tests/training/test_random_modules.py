"""Random modules, randomly cut, equal themselves uncut and eager.

A module is a list of instructions over a growing list of [B, 4, 8] tensors, so that every tensor may be used again
later: skip connections, multiple use, layers used twice, views and writes into them.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import Pipeline, batches, capture_of, copies, module_of, random_cut, weights_of
from tests.tiers import THOROUGH
from tests.training.reference import reference_loss, reference_step
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.graph import Flow, cuts
from isthmus.training.engine import EngineConfig

COLUMNS = {"x": ColumnSpec(dtype="float32", shape=(4, 8)), "y": ColumnSpec(dtype="int64", limit=4)}
CONFIG = EngineConfig(micro_batches=2, micro_batch_size=3)
KINDS = (
    "layer",
    "norm",
    "add",
    "mul",
    "gate",
    "activate",
    "activate_",
    "add_",
    "write_row",
    "write_columns",
    "transpose",
    "split",
    "attend",
    "detach",
    "no_grad",
    "constant",
    "buffer",
    "dropout",
    "as_type",
    "dropout_add_",
)


class Step(NamedTuple):
    kind: str
    left: int
    right: int
    layer: int


STEPS = st.lists(st.builds(Step, st.sampled_from(KINDS), *[st.integers(0, 7)] * 3), min_size=3, max_size=14)


class Random(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) if i else nn.LayerNorm(8) for i in range(2))
        self.head = nn.Linear(32, 4)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        values = [self.layers[0](x)]
        for step in self.steps:
            a, b = values[-1 - step.left % len(values)], values[-1 - step.right % len(values)]
            values.append(self._apply_step(step, a, b))
        return {"loss": F.cross_entropy(self.head(values[-1].flatten(1)), y), "last": values[-1]}

    def _apply_step(self, step: Step, a: Tensor, b: Tensor) -> Tensor:
        layer = self.layers[step.layer % 3]
        match step.kind:
            case "layer":
                return layer(a)
            case "norm":
                return self.norms[step.layer % 2](a)
            case "add":
                return a + b
            case "mul":
                return a * b.sigmoid()
            case "gate":
                return torch.where(a > b, a, b * 0.5)
            case "activate":
                return F.gelu(a)
            case "activate_":
                return F.relu_(a * 1.5)
            case "add_":
                out = a + 1
                out += b
                return out.mul_(0.5)
            case "write_row":
                out = a.clone()
                out[:, step.right % 4] = b[:, 0]
                return out
            case "write_columns":
                out = a * 1
                view = out[..., step.right : step.right + 2]
                view.mul_(2)
                return out + view.sum(-1, keepdim=True)
            case "transpose":
                return (a.transpose(1, 2) @ b).softmax(-1).sum(1, keepdim=True).expand(-1, 4, -1)
            case "split":
                first, second = a.chunk(2, dim=-1)
                return torch.cat([second, first.tanh()], -1)
            case "attend":
                return F.scaled_dot_product_attention(a, b, layer(b), is_causal=True)
            case "detach":
                return layer(a) * b.detach()
            case "no_grad":
                with torch.no_grad():
                    scale = layer(b).abs().mean()
                return a / (1 + scale)
            case "constant":
                return a * torch.tensor([0.5, 1.0] * 4) + torch.arange(4.0)[:, None] / 4
            case "buffer":
                if self.training:
                    with torch.no_grad():
                        self.seen.mul_(0.9).add_(a.mean((0, 1)), alpha=0.1)
                return a + b * 0.1
            case "as_type":
                return a.to(torch.float32) * b.type_as(a)
            case "dropout_add_":
                out = a * 1
                F.dropout(out, 0.0, self.training).add_(b)
                return out
            case _:
                return F.dropout(a, 0.0, self.training) - b


HANDED_BACK = (
    [
        Step("layer", 3, 2, 0),
        Step("dropout", 3, 1, 2),
        Step("mul", 5, 0, 0),
        Step("layer", 3, 2, 1),
        Step("activate", 0, 0, 1),
        Step("activate", 3, 3, 2),
        Step("layer", 1, 0, 2),
        Step("dropout", 5, 0, 0),
    ],
    [
        Step("dropout", 0, 2, 0),
        Step("split", 7, 1, 1),
        Step("gate", 3, 3, 0),
        Step("layer", 5, 3, 1),
        Step("mul", 7, 3, 0),
        Step("dropout", 0, 1, 0),
        Step("mul", 1, 0, 0),
    ],
    [
        Step("as_type", 0, 0, 0),
        Step("mul", 1, 0, 0),
        Step("split", 1, 0, 0),
        Step("add", 0, 1, 0),
        Step("add", 0, 3, 0),
    ],
    [Step("dropout_add_", 0, 0, 0), Step("mul", 1, 0, 0), Step("add", 0, 2, 0)],
)
"""Modules in which an operator returns its input itself: one tensor, whose gradient is one sum."""


@pytest.mark.parametrize("steps", HANDED_BACK)
def test_a_tensor_that_is_handed_back_crosses_once(steps: list[Step]) -> None:
    def build() -> nn.Module:
        return Random(steps)

    found = capture_of(build, COLUMNS)
    data = batches(COLUMNS, CONFIG.micro_batches, CONFIG.micro_batch_size, 200)
    expected_loss, expected = reference_step(module_of(build), copies(data), CONFIG)
    for cut in cuts(Flow(found.train)):
        pipeline = Pipeline(found, [cut.position], weights_of(build, found), CONFIG)
        loss, gradients = pipeline.step(0, copies(data))
        assert loss == expected_loss
        if pipeline.sums_in_order:
            unequal = [name for name, value in expected.items() if not torch.equal(gradients[name], value)]
            assert not unequal, cut.position


@settings(max_examples=15 if THOROUGH else 5, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_a_random_module_equals_itself_however_it_is_cut(steps: list[Step], seed: int):
    def build() -> nn.Module:
        return Random(steps)

    found = capture_of(build, COLUMNS)
    assert found.train.batch is None
    data = batches(COLUMNS, CONFIG.micro_batches, CONFIG.micro_batch_size, seed)
    module = module_of(build)
    expected_loss, expected = reference_step(module, copies(data), CONFIG)
    generator = random.Random(seed)
    for cut in ([], random_cut(found, generator), random_cut(found, generator)):
        pipeline = Pipeline(found, cut, weights_of(build, found), CONFIG)
        loss, gradients = pipeline.step(0, copies(data))
        assert loss == expected_loss
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            if pipeline.sums_in_order:
                assert torch.equal(gradients[name], value), name
            else:
                assert (gradients[name] - value).norm() <= 1e-6 * value.norm() + 1e-9, name
        state = pipeline.state()
        for name, value in module.named_buffers():
            assert name not in state or torch.equal(state[name], value), name
    evaluated = pipeline.evaluate(copies(data))
    assert evaluated == reference_loss(module, copies(data))
