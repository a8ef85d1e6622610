"""The values that a run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.graph.capture import Captured, Column, capture
from isthmus.training.checkpoint import CheckpointWriter, Manifest, rest
from isthmus.training.optim import OptimizerConfig
from isthmus.training.stored import in_memory
from isthmus.training.weights import initial_weights, resume


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("scale", torch.ones(()))
        self.shift = torch.full((3,), 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.head(self.table(ids) * self.scale + self.shift) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).mean()


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Model, {"ids": Column("int64", (4,))})


def test_every_variable_has_a_value_and_the_seed_decides_it(captured: Captured) -> None:
    weights = initial_weights(Model, captured, 3)
    for op in captured.train.ops:
        if op.kind in ("parameter", "buffer", "constant"):
            assert tuple(weights[op.target].shape) == op.outputs[0].shape_at(1), op.target
    assert torch.equal(weights["shift"], torch.full((3,), 0.5))
    torch.manual_seed(3)
    module = Model()
    assert torch.equal(weights["table.weight"], module.table.weight)
    assert weights["table.weight"].data_ptr() == weights["head.weight"].data_ptr()
    assert not torch.equal(weights["table.weight"], initial_weights(Model, captured, 4)["table.weight"])


def test_the_rest_is_what_no_stage_holds_and_no_alias(captured: Captured) -> None:
    weights = initial_weights(Model, captured, 0)
    found = rest(weights, {"table.weight"}, {"table.weight", "head.weight", "unused", "scale"})
    assert found.keys() == {"unused", "scale"}
    both = rest(weights, set(), {"table.weight", "head.weight"})
    assert len(both) == 1, "a tie that no stage holds is kept once"


ADAMW = (OptimizerConfig(),)
STATE = {f"optimizer.w.{key}": torch.ones(()) for key in ("step", "exp_avg", "exp_avg_sq")}


def _checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    writer = CheckpointWriter(folder)
    writer.write(1, "stage-0", tensors)
    return writer.commit(Manifest(step=1, seed=0, batch=1))


def test_resume_takes_weights_and_optimizer_state_by_name(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(2), "constant": torch.zeros(1)}
    found, _ = resume(weights, {"w"}, ADAMW, _checkpoint(tmp_path, {"w": torch.ones(2), **STATE}))
    assert torch.equal(in_memory(found["w"]), torch.ones(2)) and found["constant"] is weights["constant"]
    assert found.keys() == {"w", "constant", *STATE}
    assert torch.equal(weights["w"], torch.zeros(2)), "what was given is not changed"


@pytest.mark.parametrize(
    ("tensors", "expected", "optimizers", "words"),
    [
        ({"w": torch.ones(2)}, {"w", "v"}, ADAMW, "has no weight 'v'"),
        ({"w": torch.ones(3)}, {"w"}, ADAMW, "'w' of shape [3]: the model has [2]"),
        ({"w": torch.ones(2), "v": torch.ones(1)}, {"w"}, ADAMW, "'v' of shape [1]: the model has no such weight"),
        ({"w": torch.ones(2), **STATE}, {"w"}, (OptimizerConfig(name="sgd"),), "sgd keeps ['momentum_buffer']"),
        ({"w": torch.ones(2), "optimizer.w.momentum_buffer": torch.ones(2)}, {"w"}, ADAMW, "adamw keeps ['exp_avg'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], expected: set[str], optimizers: tuple[OptimizerConfig, ...], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        resume({"w": torch.zeros(2)}, expected, optimizers, _checkpoint(tmp_path, tensors))
    assert words in str(caught.value)
