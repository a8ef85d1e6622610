"""Capture: a torch module becomes two `OpGraph`s (train and eval) without allocating a weight.

The module is built and exported under fake tensors with `torch.export(strict=False)`. The batch dimension is
symbolic where the module allows it; where it does not, the graph is valid at the micro-batch size only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram, export

from isthmus.errors import IsthmusError, UserError
from isthmus.graph.building import HeldTensors, build_fake, held_by
from isthmus.graph.capture_checks import check_columns, check_gradients, check_parts, check_unchanged, plain_state
from isthmus.graph.capture_errors import ModulePath, explain, quiet, refuse_hooks
from isthmus.graph.captured import Captured, Column
from isthmus.graph.convert import convert
from isthmus.graph.measure import measure
from isthmus.graph.opgraph import OpGraph
from isthmus.graph.outputs import split_outputs
from isthmus.graph.sizes import NotAffine
from isthmus.graph.tidy import mark_training

EXAMPLE_BATCH = 4
"""Any size above 1 will do: torch specialises the sizes 0 and 1."""


class LossModule(nn.Module):
    """A user's module behind one calling convention: a dict of columns in, (loss, count or None, outputs) out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        before = plain_state(self.module)
        loss, count, others = split_outputs(self.module(**batch))
        check_unchanged(self.module, before)
        if self.module.training:
            check_gradients(loss)
        return loss, count, others


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
    with FakeTensorMode(allow_non_fake_inputs=True), refuse_hooks():
        module, made = build_fake(build, dtype)
        check_columns(module, columns)
        check_parts(module)
        for mode in ("train", "eval"):
            held = held_by(module, made)
            try:
                graph, found = _capture_mode(module.train(mode == "train"), columns, batch, dtype, name, held)
            except UserError as e:
                if mode == "eval":
                    raise UserError(f"{e} (in eval mode)") from e
                raise
            graphs[mode] = graph
            constants |= found
    train, evaluation = mark_training(graphs["train"], graphs["eval"])
    return Captured(train=train, eval=evaluation, constants=constants)


def _capture_mode(
    module: nn.Module, columns: Mapping[str, Column], batch: int, dtype: torch.dtype, name: str, held: HeldTensors
) -> tuple[OpGraph, dict[str, Tensor]]:
    mode: Literal["train", "eval"] = "train" if module.training else "eval"
    example = _example(columns, max(batch, 2), dtype)
    try:
        program = _export(module, example, symbolic=True)
        graph, constants = convert(program, name=name, mode=mode, batch=None, held=held)
    except (NotAffine, _Specialised):
        example = _example(columns, batch, dtype)
        program = _export(module, example, symbolic=False)
        graph, constants = convert(program, name=name, mode=mode, batch=batch, held=held)
    with quiet():
        graph = measure(graph)
    if mode == "train" and not any(graph.op(graph.loss.op).requires_grad):
        raise UserError("model: the loss depends on no trainable parameter, so there is nothing to train")
    return graph, constants


class _Specialised(Exception):
    """The module fixes its batch size."""


def _export(module: nn.Module, example: dict[str, Tensor], *, symbolic: bool) -> ExportedProgram:
    shapes = {"batch": {k: {0: Dim("batch", min=2, max=1 << 20)} for k in example}} if symbolic else None
    path = ModulePath(module)
    try:
        with path, quiet():
            return export(LossModule(module), (example,), strict=False, dynamic_shapes=shapes)
    except IsthmusError:
        raise
    except Exception as e:  # torch.export raises many types, some of them private
        if symbolic and _is_specialisation(e):
            raise _Specialised from e
        raise explain(e, path, example) from e


def _is_specialisation(error: Exception) -> bool:
    text = f"{type(error).__name__}: {error}"
    return "ConstraintViolation" in text or "Constraints violated" in text or "specialized" in text


def _example(columns: Mapping[str, Column], batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    example: dict[str, Tensor] = {}
    for name, column in columns.items():
        kind: object = getattr(torch, column.dtype, None)
        if not isinstance(kind, torch.dtype):
            raise UserError(f"column {name!r}: got dtype {column.dtype!r}, expected a torch dtype such as float32")
        example[name] = torch.zeros((batch, *column.shape), dtype=dtype if kind.is_floating_point else kind)
    return example
