"""What is said of an operator that raises in a step: itself, the user's module, its class and the line."""

from __future__ import annotations

import pytest
import torch
from in_process import Pipeline, capture_of, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.errors import StepError
from isthmus.training.engine import EngineConfig

COLUMNS = {"x": ColumnSpec(dtype="int64", limit=8), "y": ColumnSpec(dtype="int64", limit=4)}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), y)


def line_of(forward: object, number: int) -> str:
    return f"test_step_errors.py:{forward.__code__.co_firstlineno + number}"


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (99, 1, f"aten.embedding.default (module 'inner.table', Embedding, {line_of(Inner.forward, 1)})"),
        (1, 99, f"aten.cross_entropy_loss.default (Outer, {line_of(Outer.forward, 1)})"),
    ],
    ids=["of-a-submodule", "of-the-model-itself"],
)
def test_an_operator_that_raises_is_named_with_its_module_and_line(x: int, y: int, said: str) -> None:
    found = capture_of(Outer, COLUMNS)
    config = EngineConfig(micro_batches=1, micro_batch_size=2)
    pipeline = Pipeline(found, [], weights_of(Outer, found), config)
    with pytest.raises(StepError) as caught:
        pipeline.step(0, [{"x": torch.tensor([0, x]), "y": torch.tensor([0, y])}])
    assert caught.value.what == said
