"""From an op's JSON form to a call: the operator itself, and its arguments bound to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph.allowlist import is_allowed
from isthmus.graph.opgraph import Affine, Arg, ArgList, Named, Op, Ref

Argument = None | bool | int | float | str | torch.dtype | torch.device | Tensor | list["Argument"]


def operator_of(target: str) -> Callable[..., object]:
    """The torch operator called `target`; UserError unless it is on the allow-list."""
    if not is_allowed(target):
        raise UserError(f"operator graph: {target!r} is not on the allow-list of operators")
    _, name, overload = target.split(".")
    try:
        return cast("Callable[..., object]", getattr(getattr(torch.ops.aten, name), overload))
    except AttributeError:
        raise UserError(f"operator graph: this torch ({torch.__version__}) has no operator {target!r}") from None


def exists(target: str) -> bool:
    """Whether this torch has the operator."""
    _, name, overload = target.split(".")
    return hasattr(getattr(torch.ops.aten, name, None), overload)


def bind(
    op: Op, tensor: Callable[[Ref], Tensor], batch: int, device: torch.device
) -> tuple[list[Argument], dict[str, Argument]]:
    """Arguments of a call: refs looked up, sizes evaluated at this batch, devices set to where the stage runs."""

    def value(arg: Arg) -> Argument:
        if isinstance(arg, Ref):
            return tensor(arg)
        if isinstance(arg, Affine):
            return arg.at(batch)
        if isinstance(arg, ArgList):
            return [value(a) for a in arg.items]
        if isinstance(arg, Named):
            return named(arg, device)
        return arg

    return [value(a) for a in op.args], {k: value(v) for k, v in op.kwargs.items()}


def named(arg: Named, device: torch.device) -> Argument:
    """The torch object that a `Named` stands for."""
    if arg.kind == "device":
        return device
    if arg.kind == "float":
        return float(arg.name)
    found: object = getattr(torch, arg.name, None)
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    if not isinstance(found, kinds):
        raise UserError(f"operator graph: unknown {arg.kind} {arg.name!r}")
    return cast(Argument, found)


def no_gradient(op: Op, inputs: Sequence[bool], mode: Literal["train", "eval"]) -> bool:
    """Whether the op ran under no_grad when captured: an input needs a gradient and no output passes one on."""
    if mode == "eval":
        return True
    return bool(op.requires_grad) and any(inputs) and not any(op.requires_grad)
