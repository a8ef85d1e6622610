"""From an op's JSON form to the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph.operators import overload_of
from isthmus.graph.opgraph import DTYPE_BYTES, Affine, Arg, ArgList, Named, Op, Ref

Argument = None | bool | int | float | str | torch.dtype | torch.device | Tensor | list["Argument"]

MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
NAMED_TYPES = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}
"""By what a schema calls them. It takes plain numbers for them, too, of kinds that a graph may not name."""
CODES = ("reduction", "interpolation_mode", "padding_mode")
"""Arguments that number one of three ways; kernels return unwritten memory for a fourth."""
LARGEST_SIZE = 1 << 40
"""Of sizes, strides, paddings and the like: kernels multiply them, or add them up, without asking for overflow."""
UNBOUNDED = ("start", "end", "low", "high", "from", "to")
"""Whole numbers that are no size: of a slice, which torch cuts to the tensor, and of random numbers."""


def bind(
    op: Op, tensor: Callable[[Ref], Tensor], batch: int, device: torch.device
) -> tuple[list[Argument], dict[str, Argument]]:
    """Arguments of a call: refs looked up, sizes evaluated at this batch, devices set to where the stage runs.

    UserError for a dtype, layout or device that a graph may not ask for, in whatever form.
    """

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

    args, kwargs = [value(a) for a in op.args], {k: value(v) for k, v in op.kwargs.items()}
    _check_constants(op.target, args, kwargs)
    return args, kwargs


def named(arg: Named, device: torch.device) -> Argument:
    """The torch object that a `Named` stands for."""
    if arg.kind == "device":
        return device
    if arg.kind == "float":
        return float(arg.name)
    known = {"dtype": DTYPE_BYTES, "layout": ("strided",), "memory_format": MEMORY_FORMATS}[arg.kind]
    if arg.name not in known:
        raise UserError(f"operator graph: unknown {arg.kind} {arg.name!r}, expected one of: {', '.join(known)}")
    return cast(Argument, getattr(torch, arg.name))


def _check_constants(target: str, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> None:
    """UserError unless what the schema has as a dtype, layout, memory format, device or code is given as one."""
    arguments = overload_of(target)._schema.arguments  # pyright: ignore[reportPrivateUsage]
    by_name = {a.name: a for a in arguments}
    given = [*zip(arguments, args, strict=False), *((by_name[k], v) for k, v in kwargs.items() if k in by_name)]
    for argument, value in given:
        kind = NAMED_TYPES.get(str(argument.real_type).removeprefix("Optional[").removesuffix("]"))
        if kind is not None and value is not None and not isinstance(value, kind):
            raise UserError(
                f"operator graph: {target}: argument {argument.name!r} is {value!r}, expected a {kind.__name__}"
            )
        if argument.name in CODES and str(argument.type) == "int" and not (type(value) is int and 0 <= value <= 2):
            raise UserError(f"operator graph: {target}: argument {argument.name!r} is {value!r}, expected 0, 1 or 2")
        numbers = value if isinstance(value, list) else [value] if "int" in str(argument.type) else []
        beyond = any(isinstance(v, int) and abs(v) > LARGEST_SIZE for v in numbers)
        if beyond and argument.name not in UNBOUNDED:
            raise UserError(f"operator graph: {target}: argument {argument.name!r} is {value!r}, beyond any memory")


def no_gradient(op: Op, inputs: Sequence[bool], mode: Literal["train", "eval"]) -> bool:
    """Whether the op ran under no_grad when captured: an input needs a gradient and no output passes one on."""
    if mode == "eval":
        return True
    return bool(op.requires_grad) and any(inputs) and not any(op.requires_grad)
