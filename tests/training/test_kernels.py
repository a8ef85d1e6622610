"""TF32 and deterministic kernels: what is set, and what is said where it cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from in_process import Pipeline, batches, capture_of, weights_of
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import X

from isthmus.accelerators import HOST, Accelerator
from isthmus.errors import StepError
from isthmus.training.engine import EngineConfig
from isthmus.training.kernels import CUBLAS_WORKSPACE, Kernels

BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    before, benchmark = [backend.fp32_precision for backend in BACKENDS], torch.backends.cudnn.benchmark
    yield
    os.environ.pop(CUBLAS_WORKSPACE, None)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


def of_kind(kind: str) -> Accelerator:
    return cast(Accelerator, SimpleNamespace(device=torch.device(kind), name=f"a {kind}"))


@pytest.mark.parametrize(("asked", "precision"), [(True, "tf32"), (False, "ieee")])
def test_tf32_is_for_products_and_convolutions_alike(asked: bool, precision: str) -> None:
    assert not Kernels(tf32=asked).use(of_kind("cuda"))
    assert {backend.fp32_precision for backend in BACKENDS} == {precision}


def test_nothing_is_set_that_nobody_asked_for_and_what_is_not_there_is_said() -> None:
    before = [backend.fp32_precision for backend in BACKENDS]
    assert not Kernels().use(of_kind("cuda"))
    assert not Kernels(tf32=False).use(of_kind("mps"))
    assert Kernels(tf32=True).use(of_kind("mps")) == "runtime.tf32: ignored: a mps has none"
    assert [backend.fp32_precision for backend in BACKENDS] == before
    assert not torch.are_deterministic_algorithms_enabled()


class Unpooling(nn.Module):
    """Torch has no deterministic kernel for it, wherever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pooled, places = F.max_pool2d(x.unsqueeze(1), 2, return_indices=True)
        return F.cross_entropy(self.head(F.max_unpool2d(pooled, places, 2).flatten(1)), y)


def test_an_operator_without_a_deterministic_kernel_is_named() -> None:
    captured = capture_of(Unpooling, X)
    pipeline = Pipeline(captured, [], weights_of(Unpooling, captured), EngineConfig(micro_batch_size=2))
    data = batches(X, 1, 2)
    pipeline.step(0, data)
    assert not Kernels(deterministic=True).use(HOST)
    assert os.environ[CUBLAS_WORKSPACE] == ":4096:8"
    with pytest.raises(StepError, match=r"aten\.max_unpool2d.*does not have a deterministic implementation"):
        pipeline.step(1, data)
