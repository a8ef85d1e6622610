"""Work of torch's kernels around an operator: the type that they compute in, the derivative, and the arguments that
they refuse.

A kernel computes numbers of 16 bits in float32 and rounds once, the result and each gradient. A derivative is torch's
formula, which says what comes at kinks and ties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from jax import Array

Operator = Callable[..., Any]  # arrays and plain values to an array, or to a tuple of them
Number = bool | int | float


def dtype_of(dtype: torch.dtype) -> jnp.dtype[Any]:
    """JAX's name of a type of torch's."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def is_half(x: Array) -> bool:
    """Return whether its numbers have 16 bits."""
    return x.dtype in (jnp.bfloat16, jnp.float16)


def is_real(x: Array) -> bool:
    """Return whether it has numbers with fractions, of whatever width."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def wide(x: Any) -> Any:
    """In the type that torch's kernels compute in: float32 for numbers of 16 bits. Lists by element; other things stay
    as they are."""
    if isinstance(x, Array):
        return x.astype(jnp.float32) if is_half(x) else x
    if isinstance(x, list | tuple):
        return [wide(one) for one in cast("Sequence[object]", x)]
    return x


def widened(operator: Operator) -> Operator:
    """The operator, computed in wide numbers. The program rounds what it gives to the type that the graph names."""
    return lambda *given, **named: operator(*map(wide, given), **{key: wide(one) for key, one in named.items()})


def floating(x: Array) -> Array:
    """Whole numbers become float32, as in torch's functions of real numbers."""
    return x if is_real(x) else x.astype(jnp.float32)


def common_type(*operands: Array | Number) -> torch.dtype:
    """The type in which torch combines them: arrays with dimensions count before those without and numbers."""
    first, *others = (_stand_in(one) for one in operands)
    found = torch.result_type(first, first)
    for one in others:
        found = torch.result_type(first, one)
        ndim = max(getattr(first, "ndim", 0), getattr(one, "ndim", 0))
        first = torch.empty((1,) * ndim, dtype=found, device="meta")
    return found


def _stand_in(operand: Array | Number) -> Any:
    if not isinstance(operand, Array):
        return operand
    return torch.empty((1,) * operand.ndim, dtype=getattr(torch, operand.dtype.name), device="meta")


def together(*operands: Array | Number, exact: bool = True) -> list[Array]:
    """In their common type, wide, of one shape. Numbers that meet those of 16 bits stay `exact`, or are rounded to them
    as in comparisons."""
    dtype = dtype_of(common_type(*operands))
    made = [
        jnp.asarray(one, jnp.float32)
        if exact and not isinstance(one, Array) and dtype in (jnp.bfloat16, jnp.float16)
        else jnp.asarray(one, dtype)
        for one in operands
    ]
    return jnp.broadcast_arrays(*map(wide, made))


def paired(operator: Operator, *, exact: bool = True) -> Operator:
    """The operator of two operands, `together`."""
    return lambda a, b, **named: operator(*together(a, b, exact=exact), **named)


def of_one(value: Operator, backward: Operator, keeps: str = "x", *, compares: bool = False) -> Operator:
    """`value(x)` whose gradient is `backward(g, x, y)`, y the rounded result. `keeps` names which of x and y the
    backward takes; the other is None. One that `compares` them takes the same x: XLA may compute x anew for y, rounded
    otherwise, so that no element is the largest."""

    def forward(x: Array) -> Array:
        return value(wide(x)).astype(x.dtype)

    def kept(x: Array) -> Any:
        x = jax.lax.optimization_barrier(x) if compares else x
        y = forward(x)
        return y, (x if "x" in keeps else None, y if "y" in keeps else None)

    def pulled(saved: Any, g: Array) -> tuple[Array]:
        return (backward(wide(g), *map(wide, saved)).astype(g.dtype),)

    of = jax.custom_vjp(forward)
    of.defvjp(kept, pulled)
    return lambda x: of(x) if is_real(x) else forward(x)


def of_several(value: Operator, backward: Operator) -> Operator:
    """`value(*arrays)` of wide arrays of one shape, whose gradients are `backward(g, *arrays)`."""
    of = jax.custom_vjp(value)
    of.defvjp(lambda *arrays: (value(*arrays), arrays), lambda arrays, g: tuple(backward(g, *arrays)))
    return lambda *arrays: of(*arrays) if is_real(arrays[0]) else value(*arrays)


def picking(pick: Operator) -> Operator:
    """`pick(x, *indices)`, which takes elements of x as they are: the gradients of one that is taken more than once are
    summed in wide numbers."""

    def backward(saved: Any, g: Array) -> Any:
        shape, indices = saved
        like = jax.ShapeDtypeStruct(shape.shape, wide(g).dtype)
        (found,) = jax.linear_transpose(lambda x: pick(x, *indices), like)(wide(g))
        return (found.astype(g.dtype), *(None for _ in indices))

    of = jax.custom_vjp(pick)
    # an array without elements' values: its shape is all that the backward needs
    of.defvjp(lambda x, *indices: (pick(x, *indices), (_Shape(x.shape), indices)), backward)
    return lambda x, *indices: of(x, *indices) if is_real(x) else pick(x, *indices)


@jax.tree_util.register_static
class _Shape:
    """The shape of an array, without its values."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and other.shape == self.shape

    def __hash__(self) -> int:
        return hash(self.shape)


_asked: ContextVar[list[Array] | None] = ContextVar("_asked", default=None)


@contextlib.contextmanager
def asking() -> Generator[list[Array]]:
    """Collect the questions that operators ask of values inside: compiled code cannot raise."""
    found: list[Array] = []
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def expect(condition: Array) -> None:
    """Torch raises where an element of it is false."""
    if (asked := _asked.get()) is not None:
        asked.append(jnp.all(condition))


def expect_indices(index: Array, length: int, *, negative: bool = False) -> None:
    """Torch raises for indices beyond the length; for negative ones where they do not count from the end."""
    expect((index < length) & (index >= (-length if negative else 0)))
