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
from isthmus.training.faults import is_drivers, is_short_of_memory, raise_if_jobs

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


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("GET was unable to find an engine to execute this computation", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`", False),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error", False),
    ],
)
def test_what_an_accelerators_libraries_say_is_not_the_jobs_fault(text: str, short: bool) -> None:
    error = RuntimeError(text)
    raise_if_jobs("aten.mm", error)
    assert is_short_of_memory(error) is short
    assert is_drivers(error) is not short


def test_other_errors_of_an_operator_are_the_jobs() -> None:
    with pytest.raises(StepError, match="mat1 and mat2 shapes"):
        raise_if_jobs("aten.mm", RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
