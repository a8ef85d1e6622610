"""Capture: a torch module becomes two `OpGraph`s (train and eval) without allocating a weight.

The module is built and exported under fake tensors with `torch.export(strict=False)`. The batch dimension is
symbolic where the module allows it; where it does not, the graph is valid at the micro-batch size only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram, export

from isthmus.errors import IsthmusError, UserError
from isthmus.graph.capture_errors import ModulePath, explain
from isthmus.graph.convert import convert
from isthmus.graph.measure import measure
from isthmus.graph.opgraph import OpGraph
from isthmus.graph.sizes import NotAffine

EXAMPLE_BATCH = 4
"""Any size above 1 will do: torch specialises the sizes 0 and 1."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """Both graphs of a model, and the constants that its forward makes (`torch.tensor([...])`)."""

    train: OpGraph
    eval: OpGraph
    constants: dict[str, Tensor]


class Column(msgspec.Struct, frozen=True):
    """Type and shape of one input of the model, without the batch dimension."""

    dtype: str
    shape: tuple[int, ...]


class LossModule(nn.Module):
    """A user's module behind one calling convention: a dict of columns in, (loss, count or None, outputs) out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        return split_outputs(self.module(**batch))


def capture(
    build: Callable[[], nn.Module],
    columns: Mapping[str, Column],
    *,
    name: str = "model",
    batch: int = EXAMPLE_BATCH,
    dtype: torch.dtype = torch.float32,
) -> Captured:
    """Build the module and export its train and eval graphs; no weight is allocated.

    `columns` are the keyword arguments of the forward; every tensor's first dimension is the batch. `batch` is the
    size to capture at when the module does not allow a symbolic one. `dtype` is the compute type: parameters
    and floating-point columns are cast to it.

    Raises UserError, naming the module path and what to change, for whatever torch.export cannot take and for a
    forward that does not return a scalar loss.
    """
    constants: dict[str, Tensor] = {}
    graphs: dict[str, OpGraph] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = build()
        if dtype is not torch.float32:
            module = module.to(dtype)
        for mode in ("train", "eval"):
            graph, found = _capture_mode(module.train(mode == "train"), columns, name, batch, dtype)
            graphs[mode] = graph
            constants |= found
    return Captured(train=graphs["train"], eval=graphs["eval"], constants=constants)


def _capture_mode(
    module: nn.Module, columns: Mapping[str, Column], name: str, batch: int, dtype: torch.dtype
) -> tuple[OpGraph, dict[str, Tensor]]:
    mode: Literal["train", "eval"] = "train" if module.training else "eval"
    names = _own_names(module)
    try:
        program = _export(module, _example(columns, max(batch, 2), dtype), symbolic=True)
        graph, constants = convert(program, name=name, mode=mode, batch=None, own_names=names)
    except (NotAffine, _Specialised):
        program = _export(module, _example(columns, batch, dtype), symbolic=False)
        graph, constants = convert(program, name=name, mode=mode, batch=batch, own_names=names)
    return measure(graph), constants


class _Specialised(Exception):
    """The module fixes its batch size."""


def _export(module: nn.Module, example: dict[str, Tensor], *, symbolic: bool) -> ExportedProgram:
    shapes = {"batch": {k: {0: Dim("batch", min=2, max=1 << 20)} for k in example}} if symbolic else None
    path = ModulePath(module)
    try:
        with path:
            return export(LossModule(module), (example,), strict=False, dynamic_shapes=shapes)
    except IsthmusError:
        raise
    except Exception as e:  # torch.export raises many types, some of them private
        if symbolic and _is_specialisation(e):
            raise _Specialised from e
        raise explain(e, path, tuple(example)) from e


def _is_specialisation(error: Exception) -> bool:
    text = f"{type(error).__name__}: {error}"
    return "ConstraintViolation" in text or "Constraints violated" in text or "specialized" in text


def _own_names(module: nn.Module) -> dict[str, str]:
    """Every name of each parameter, buffer and tensor attribute -> the first name of the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    attributes = (
        (f"{path}.{key}" if path else key, value)
        for path, part in module.named_modules(remove_duplicate=False)
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    )
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in (*named, *attributes):
        found[name] = first.setdefault(id(tensor), name)
    return found


def _example(columns: Mapping[str, Column], batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    example: dict[str, Tensor] = {}
    for name, column in columns.items():
        kind = cast(torch.dtype, getattr(torch, column.dtype))
        example[name] = torch.zeros((batch, *column.shape), dtype=dtype if kind.is_floating_point else kind)
    return example


def split_outputs(result: object) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(loss, count, other outputs) of what a forward returned.

    A scalar; (loss_sum, count, ...) with both scalars; or a mapping with `loss` (and `count`, when `loss` is a sum).
    """
    count: Tensor | None = None
    others: dict[str, Tensor] = {}
    loss = result
    if isinstance(result, Mapping):
        found = cast(Mapping[str, object], result)
        if "loss" not in found:
            raise UserError(f"model: forward returned a mapping with {sorted(found)}, expected a scalar under 'loss'")
        loss, count = found["loss"], cast("Tensor | None", found.get("count"))
        others = {k: v for k, v in found.items() if k not in ("loss", "count") and isinstance(v, Tensor)}
    elif isinstance(result, (tuple, list)) and result:
        values = cast("tuple[object, ...]", tuple(result))
        loss, rest = values[0], values[1:]
        if rest and isinstance(rest[0], Tensor) and rest[0].ndim == 0:
            count, rest = rest[0], rest[1:]
        others = {f"output_{i}": v for i, v in enumerate(rest) if isinstance(v, Tensor)}
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.dtype.is_floating_point:
        raise UserError(
            f"model: forward returned {_shape(loss)} as its loss, expected a scalar floating-point tensor, "
            "(loss_sum, count) or a mapping with 'loss'"
        )
    return loss, count, others


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}"
