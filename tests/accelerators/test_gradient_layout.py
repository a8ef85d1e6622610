"""Gradients lie in memory as on the CPU: sums over them have the same order, and so the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.data import ColumnSpec
from isthmus.graph import Flow, Ref, assign, partition
from isthmus.graph.partition import align
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.optim import gradient_norms
from isthmus_testing.emulated_accelerator import open_checked
from tests.training.in_process import capture_of, module_of, weights_of
from tests.training.reference import reference_step

CONFIG = EngineConfig(micro_batches=1, micro_batch_size=4, clip_norm=1.0)
COLUMNS = {"x": ColumnSpec(dtype="float32", shape=(7, 32))}
BATCH = {"x": torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(0))}


class Turned(nn.Module):
    """The first stage's result, and a parameter of the second, get gradients with other strides than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(32))
        self.table = nn.Parameter(torch.randn(7, 32))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * self.scale).transpose(1, 2).contiguous()
        return (turned * self.table.t()).tanh().mean()


def _step(accelerator: Accelerator) -> tuple[tuple[int, ...], dict[str, Tensor], Tensor]:
    """Of a step in two stages: strides of the gradient between them, gradients and their norms."""
    captured = capture_of(Turned, COLUMNS)
    flow, evaluated = Flow(captured.train), Flow(captured.eval)
    stage_of = assign(flow, [1])
    first, second = (
        TorchEngine(train, evaluation, CONFIG, weights_of(Turned, captured), accelerator=accelerator)
        for train, evaluation in zip(
            partition(flow, stage_of), partition(evaluated, align(flow, evaluated, stage_of)), strict=True
        )
    )
    columns = {Ref(op.name): BATCH[op.target] for op in captured.train.ops if op.kind == "placeholder"}
    sent = first.forward(0, 0, {ref: tensor.to(accelerator.device) for ref, tensor in columns.items()})
    second.forward(0, 0, sent)
    returned = second.backward(0, [])
    first.backward(0, [returned])
    norms = torch.cat([first.collect(None), second.collect(None)])
    (strides,) = [tuple(gradient.stride()) for gradient in returned.values()]
    return strides, {n: g.cpu() for n, g in (first.gradients() | second.gradients()).items()}, norms.cpu()


@pytest.mark.parametrize("kind", ["cpu", "checked"])
def test_gradients_lie_and_sum_as_in_the_plain_module(kind: str) -> None:
    strides, gradients, norms = _step(open_checked(0, fresh=True) if kind == "checked" else HOST)
    _, expected = reference_step(module_of(Turned), [BATCH], CONFIG)
    assert strides == (7 * 32, 1, 7)
    assert {n: g.stride() for n, g in gradients.items()} == {n: g.stride() for n, g in expected.items()}
    assert not [n for n, g in expected.items() if not torch.equal(gradients[n], g)]
    assert torch.equal(norms, gradient_norms([expected[n] for n in gradients]))
