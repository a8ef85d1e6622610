"""Which operators JAX computes: by name, without the overload."""

from __future__ import annotations

from collections.abc import Mapping

from torch._ops import OpOverload

from isthmus.training.jax.elementwise import ELEMENTWISE, Operator
from isthmus.training.jax.layers import LAYERS
from isthmus.training.jax.layouts import LAYOUTS

OPERATORS: Mapping[str, Operator] = {**ELEMENTWISE, **LAYOUTS, **LAYERS}


LEFT_OUT = frozenset({"aten.narrow.Tensor", "aten.view.dtype", "aten.where.default"})
"""Overloads whose sizes depend on values, or that read memory as another type."""


def is_computed(target: str) -> bool:
    """Whether JAX computes the operator."""
    return base_name(target) in OPERATORS and target not in LEFT_OUT


def base_name(target: str) -> str:
    """`add` of `aten.add_.Tensor`."""
    name = target.split(".")[1]
    return name if name.startswith("__") else name.rstrip("_")


def in_place(operator: OpOverload) -> bool:
    """Whether it writes its first argument."""
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
