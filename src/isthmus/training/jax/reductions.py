"""Operators that reduce or normalize along dimensions. Sums of numbers of 16 bits are made in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from isthmus.training.jax.arrays import Operator, dtype_of, floating, is_real, of_one, wide
from isthmus.training.jax.elementwise import ELEMENTWISE

Axes = int | Sequence[int] | None
Shape = int | tuple[int, ...] | None


def _in(x: Array, dtype: torch.dtype | None) -> Array:
    """The elements in that type, if one is named; wide."""
    return wide(x if dtype is None else x.astype(dtype_of(dtype)))


def _summable(x: Array, dtype: torch.dtype | None) -> Array:
    """Whole numbers are summed in 64 bits."""
    return _in(x, dtype) if dtype is not None or is_real(x) else x.astype(jnp.int64)


def _axes(x: Array, dim: Axes) -> Shape:
    """No dimension in a list means all of them; of a single number, dimension 0 may be named."""
    if dim is None or x.ndim == 0:
        return None
    return dim if isinstance(dim, int) else tuple(dim) or None


def _softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    return softmax(x if dtype is None else x.astype(dtype_of(dtype)), dim)


def softmax(x: Array, dim: int) -> Array:
    """Its gradient is made of the result: that of a row without a number is 0 where the row's weights are."""
    axis = dim if x.ndim else None
    return of_one(
        lambda x: jax.nn.softmax(x, axis=dim) if x.ndim else jnp.ones_like(x),
        lambda g, _, y: g * y - y * jnp.sum(g * y, axis=axis, keepdims=True),
        "y",
    )(x)


def log_softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """Its gradient is made of the result."""
    axis = dim if x.ndim else None
    return of_one(
        lambda x: jax.nn.log_softmax(x, axis=dim) if x.ndim else jnp.zeros_like(x),
        lambda g, _, y: g - jnp.exp(y) * jnp.sum(g, axis=axis, keepdims=True),
        "y",
    )(x if dtype is None else x.astype(dtype_of(dtype)))


def _sum(x: Array, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.sum(_summable(x, dtype), axis=_axes(x, dim), keepdims=keepdim)


def _mean(x: Array, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.mean(_in(x, dtype), axis=_axes(x, dim), keepdims=keepdim)


def _prod(x: Array, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.prod(_summable(x, dtype), axis=_axes(x, dim), keepdims=keepdim)


def _variance(x: Array, axis: Shape, ddof: float, *, keepdim: bool) -> Array:
    axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else axis
    count = math.prod(x.shape[a] for a in axes)

    def far(x: Array) -> Array:
        return x - jnp.mean(x, axis=axis, keepdims=True)

    def value(x: Array) -> Array:
        return jnp.sum(jnp.square(far(x)), axis=axis, keepdims=keepdim) / np.float32(max(0, count - ddof))

    def backward(g: Array, x: Array, _: Any) -> Array:
        twice = math.inf if count == ddof else 2 / (count - ddof)
        return twice * (g if keepdim else _opened(g, x.ndim, axis)) * far(x)

    return of_one(value, backward)(wide(x))


_root = of_one(jnp.sqrt, lambda g, _, y: jnp.where(y == 0, 0, g / (2 * y)), "y")
"""The square root of a variance: equal numbers have no gradient."""


def _spread(*, root: bool, mean: bool = False) -> Operator:
    """All overloads: `(x, unbiased)`, `(x, dim, unbiased, keepdim)` and `(x, dim, *, correction, keepdim)`."""

    def spread(
        x: Array,
        dim: Axes | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        ddof = (1 if unbiased else 0) if correction is None else correction
        found = _variance(x, _axes(x, dim), ddof, keepdim=keepdim)
        found = _root(found) if root else found
        return (found, _mean(x, dim, keepdim)) if mean else found

    return spread


def _along(reduce: Operator) -> Operator:
    return lambda x, dim=None, keepdim=False: reduce(wide(x), axis=_axes(x, dim), keepdims=keepdim)


def _most(reduce: Operator) -> Operator:
    """All that are the extreme one share its gradient."""

    def most(x: Array, dim: Axes = (), keepdim: bool = False) -> Array:
        axis = _axes(x, dim)

        def backward(g: Array, x: Array, y: Array) -> Array:
            g, y = (one if keepdim else _opened(one, x.ndim, axis) for one in (g, y))
            same = x == y
            return jnp.where(same, g, 0 * g) / jnp.sum(same, axis=axis, keepdims=True)

        return of_one(lambda x: reduce(x, axis=axis, keepdims=keepdim), backward, "xy", compares=True)(x)

    return most


def _over_truths(reduce: Operator) -> Operator:
    """Here no dimension in a list means none."""

    def over(x: Array, dim: Axes = None, keepdim: bool = False) -> Array:
        none = isinstance(dim, list | tuple) and not dim
        return x.astype(bool) if none else reduce(x, axis=_axes(x, dim), keepdims=keepdim)

    return over


def _shared(g: Array, x: Array, y: Array) -> Array:
    """Between all that are the extreme one; or that are no number, if it is none."""
    same = jnp.where(jnp.isnan(y), jnp.isnan(x), x == y)
    return jnp.where(same, g / jnp.sum(same), 0)


def _extreme(value: Operator, place: Operator, pairwise: Operator) -> Operator:
    """`(values, indices)` along a dimension; without one the value alone, and of two arrays the elements' values."""

    def extreme(x: Array, dim: int | Array | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return of_one(value, _shared, "xy", compares=True)(x)
        if not isinstance(dim, int):
            return pairwise(x, dim)
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        where = place(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, where, axis=dim)
        return (found, where) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(where, dim))

    return extreme


def _norm(x: Array, ord: float = 2, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    """Return the norm. A zero vector has no gradient, whatever the order."""
    axis = _axes(x, dim)

    def opened(y: Array) -> Array:
        """With the dimensions that were reduced."""
        return y if keepdim else _opened(y, x.ndim, axis)

    value, gradient = _norms(ord)
    return of_one(
        lambda x: value(x, lambda r, v: r(v, axis=axis, keepdims=keepdim)),
        lambda g, x, y: gradient(opened(g), x, opened(y), axis),
        "xy",
        compares=math.isinf(ord),
    )(_in(floating(x), dtype))


def _opened(y: Array, ndim: int, axis: Shape) -> Array:
    return jnp.expand_dims(y, tuple(range(ndim)) if axis is None else axis)


def _norms(order: float) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """`value(x, reduce)` and `gradient(g, x, y, axis)`."""
    size = jnp.abs
    sign = ELEMENTWISE["sign"]
    if math.isinf(order):
        extreme = jnp.max if order > 0 else jnp.min

        def of_extremes(g: Array, x: Array, y: Array, axis: Shape) -> Array:
            same = (size(x) == y) | jnp.isnan(x)
            return sign(x) * jnp.where(same, g / jnp.sum(same, axis=axis, keepdims=True), 0)

        return lambda x, reduce: reduce(extreme, size(x)), of_extremes
    if order == 0:
        return lambda x, reduce: reduce(jnp.sum, (x != 0).astype(x.dtype)), lambda g, x, y, axis: jnp.zeros_like(x)
    if order == 1:
        return lambda x, reduce: reduce(jnp.sum, size(x)), lambda g, x, y, axis: sign(x) * g
    if order == 2:
        return (
            lambda x, reduce: jnp.sqrt(reduce(jnp.sum, x * x)),
            lambda g, x, y, axis: g * jnp.where(y == 0, 0, x / y),
        )

    def powers(g: Array, x: Array, y: Array, axis: Shape) -> Array:
        if order < 1:
            return sign(x) * jnp.where(x == 0, 0, size(x) ** (order - 1)) * g * y ** (1 - order)
        scale = jnp.where(y == 0, 0, g / y ** (order - 1))
        return (sign(x) * size(x) ** (order - 1) if order < 2 else x * size(x) ** (order - 2)) * scale

    return lambda x, reduce: reduce(jnp.sum, size(x) ** order) ** (1 / order), powers


def _logsumexp(x: Array, dim: Axes, keepdim: bool = False) -> Array:
    axis = _axes(x, dim)

    def value(x: Array) -> Array:
        if x.size == 0:
            return jnp.log(jnp.sum(jnp.exp(x), axis=axis, keepdims=keepdim))
        most = jnp.max(x, axis=axis, keepdims=True)
        most = jnp.where(jnp.isinf(most), 0, most)
        total = jnp.log(jnp.sum(jnp.exp(x - most), axis=axis, keepdims=True)) + most
        return total if keepdim else jnp.squeeze(total, axis)

    def backward(g: Array, x: Array, y: Array) -> Array:
        g, y = (one if keepdim else _opened(one, x.ndim, axis) for one in (g, y))
        return g * jnp.exp(x - y)

    return of_one(value, backward, "xy")(floating(x))


def _cumsum(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    x = _summable(x, dtype)
    return jnp.cumsum(x, axis=dim) if x.ndim else x


REDUCTIONS: Mapping[str, Operator] = {
    "softmax": _softmax,
    "log_softmax": log_softmax,
    "sum": _sum,
    "mean": _mean,
    "prod": _prod,
    "cumsum": _cumsum,
    "var": _spread(root=False),
    "std": _spread(root=True),
    "var_mean": _spread(root=False, mean=True),
    "std_mean": _spread(root=True, mean=True),
    "amax": _most(jnp.max),
    "amin": _most(jnp.min),
    "max": _extreme(jnp.max, jnp.argmax, ELEMENTWISE["maximum"]),
    "min": _extreme(jnp.min, jnp.argmin, ELEMENTWISE["minimum"]),
    "argmax": _along(jnp.argmax),
    "argmin": _along(jnp.argmin),
    "any": _over_truths(jnp.any),
    "all": _over_truths(jnp.all),
    "linalg_vector_norm": _norm,
    "logsumexp": _logsumexp,
}
