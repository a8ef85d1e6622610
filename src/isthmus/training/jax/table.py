"""The operators that JAX computes, by name without the overload: torch's meaning in `jax.numpy`."""

from __future__ import annotations

from collections.abc import Mapping

from torch._ops import OpOverload

from isthmus.training.jax.arrays import Operator
from isthmus.training.jax.elementwise import ELEMENTWISE
from isthmus.training.jax.layers import LAYERS
from isthmus.training.jax.layouts import LAYOUTS
from isthmus.training.jax.losses import LOSSES
from isthmus.training.jax.reductions import REDUCTIONS

OPERATORS: Mapping[str, Operator] = {**ELEMENTWISE, **REDUCTIONS, **LAYOUTS, **LAYERS, **LOSSES}
"""Their names are those of `operators.txt`."""


def in_place(operator: OpOverload) -> bool:
    """Whether it writes its first argument."""
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
