"""A captured model: two operator graphs and its constants, and how they are kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from isthmus.atomic_write import atomic_write
from isthmus.errors import UserError
from isthmus.graph.metrics import MetricSums
from isthmus.graph.opgraph import OpGraph, decode, encode


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """Both graphs of a model, and the constants that its forward makes (`torch.tensor([...])`)."""

    train: OpGraph
    eval: OpGraph
    constants: dict[str, Tensor]


class Column(msgspec.Struct, frozen=True):
    """Type and shape of one input of the model, without the batch dimension."""

    dtype: str
    shape: tuple[int, ...]
    uneven: bool = False  # whether a loss may leave values of it out, as labels of -100


class Capture(Protocol):
    """The type of `isthmus.graph.capture`."""

    def __call__(
        self,
        build: Callable[[], nn.Module],
        columns: Mapping[str, Column],
        *,
        name: str = ...,
        batch: int = ...,
        dtype: torch.dtype = ...,
        metrics: MetricSums | None = ...,
    ) -> Captured: ...


class ServingCapture(Protocol):
    """The type of `isthmus.graph.serving_capture.capture_serving`."""

    def __call__(
        self, build: Callable[[], nn.Module], *, name: str, dtype: torch.dtype, trained: int
    ) -> tuple[OpGraph, dict[str, Tensor], int]: ...


def write_captured(path: Path, captured: Captured, about: str) -> None:
    """One file, whole or not there: constants as tensors, graphs and `about`, whatever that is, beside them."""
    texts = {"about": about, "train": encode(captured.train).decode(), "eval": encode(captured.eval).decode()}
    as_rows = torch.contiguous_format  # of their own each: no file has two of the same memory
    constants = {name: t.detach().clone(memory_format=as_rows) for name, t in captured.constants.items()}
    atomic_write(path, safetensors.torch.save(constants, metadata=texts))


def read_captured(path: Path) -> tuple[Captured, str] | None:
    """With what was written about it; None where there is none, or none that can be read any more."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata()
            constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        captured = Captured(
            train=decode(texts["train"].encode()), eval=decode(texts["eval"].encode()), constants=constants
        )
        return captured, texts["about"]
    except (OSError, SafetensorError, KeyError, UserError):
        return None
