"""The operators that JAX computes, by name without the overload: torch's meaning in `jax.numpy`."""

from __future__ import annotations

from collections.abc import Mapping

from torch._ops import OpOverload

from isthmus.training.jax.elementwise import ELEMENTWISE, Operator
from isthmus.training.jax.layers import LAYERS
from isthmus.training.jax.layouts import LAYOUTS

OPERATORS: Mapping[str, Operator] = {**ELEMENTWISE, **LAYOUTS, **LAYERS}
"""Their names are those of `operators.txt`."""


def in_place(operator: OpOverload) -> bool:
    """Whether it writes its first argument."""
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
