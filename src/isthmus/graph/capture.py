"""Capture: a torch module becomes two `OpGraph`s (train and eval) without allocating a weight. What a module may not
have or do is refused, since its graph would silently be another model.

The module is built and exported under fake tensors with `torch.export(strict=False)`. The batch dimension is
symbolic where the module allows it; where it does not, the graph is valid at the micro-batch size only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.export import Dim, ExportedProgram, export

from isthmus.errors import IsthmusError, UserError
from isthmus.graph.building import HeldTensors, build_fake, held_by
from isthmus.graph.capture_errors import ModulePath, explain, quiet, refuse_hooks
from isthmus.graph.captured import Captured, Column
from isthmus.graph.convert import convert
from isthmus.graph.measure import measure
from isthmus.graph.opgraph import OpGraph
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


PlainState = Mapping[str, Mapping[str, object]]
"""Per submodule, its attributes that are plain numbers and texts."""


def check_columns(module: nn.Module, columns: Collection[str]) -> None:
    """UserError unless the module's forward takes exactly these keyword arguments."""
    parameters = inspect.signature(module.forward).parameters
    keyword = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [n for n, p in keyword.items() if p.default is p.empty and n not in columns]
    unexpected = [] if takes_any else [c for c in columns if c not in keyword]
    if missing or unexpected:
        parts = [f"it needs {missing}" if missing else "", f"it does not take {unexpected}" if unexpected else ""]
        raise UserError(
            f"model: forward({', '.join(keyword)}) does not fit the data's columns {list(columns)}: "
            f"{' and '.join(p for p in parts if p)}"
        )


def check_parts(module: nn.Module) -> None:
    """UserError for hooks on a submodule's backward."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
            raise UserError(
                f"model: module {path or type(module).__name__!r} has a hook on its backward, which would be lost in "
                "the graph: leave it out"
            )


def plain_state(module: nn.Module) -> PlainState:
    return {
        path: {k: v for k, v in vars(part).items() if isinstance(v, (int, float, str)) and k != "training"}
        for path, part in module.named_modules()
    }


def check_unchanged(module: nn.Module, before: PlainState) -> None:
    """UserError where the forward changed a plain attribute: the graph holds its first value for ever."""
    for path, state in plain_state(module).items():
        for name, value in state.items():
            old = before.get(path, {}).get(name, value)
            if old != value and not (old != old and value != value):
                raise UserError(
                    f"model: in module {path or type(module).__name__!r}: forward changes self.{name} from {old!r} to "
                    f"{value!r}, which a graph cannot follow: make it a buffer (register_buffer), or leave it out"
                )


def check_gradients(loss: Tensor) -> None:
    """UserError for an autograd.Function on the way to the loss: a graph holds its forward, not the backward that its
    author wrote."""
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not _author(node).__module__.startswith("torch."):
            raise UserError(
                f"model: autograd.Function {_author(node).__name__!r} brings its own backward, which a graph cannot "
                f"hold: write it with torch operators (it is in {_author(node).__module__})"
            )
        todo += [following for following, _ in node.next_functions]


def _author(node: BackwardCFunction) -> type:
    return cast(type, node._forward_cls)  # pyright: ignore[reportAttributeAccessIssue]  # set by torch's metaclass


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
        loss, count = found["loss"], _as_count(found.get("count"))
        others = {k: v for k, v in found.items() if k not in ("loss", "count") and isinstance(v, Tensor)}
    elif isinstance(result, (tuple, list)) and result:
        values = cast("tuple[object, ...]", tuple(result))
        loss, rest = values[0], values[1:]
        if rest and (isinstance(rest[0], (int, torch.SymInt)) or (isinstance(rest[0], Tensor) and rest[0].ndim == 0)):
            count, rest = _as_count(rest[0]), rest[1:]
        others = {f"output_{i}": v for i, v in enumerate(rest) if isinstance(v, Tensor)}
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.dtype.is_floating_point:
        raise UserError(
            f"model: forward returned {_shape(loss)} as its loss, expected a scalar floating-point tensor, "
            "(loss_sum, count) or a mapping with 'loss'"
        )
    return loss, count, others


def _as_count(value: object) -> Tensor | None:
    if value is None or (isinstance(value, Tensor) and value.ndim == 0):
        return value
    if isinstance(value, (int, torch.SymInt)):
        return torch.full((), cast(int, value), dtype=torch.int64)
    raise UserError(f"model: forward returned {_shape(value)} as its count, expected an integer or a scalar tensor")


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        sizes = ", ".join(str(s) if type(s) is int else "batch" for s in value.shape)
        return f"a tensor of shape [{sizes}] and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}"
