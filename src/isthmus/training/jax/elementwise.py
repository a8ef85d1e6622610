"""Operators that compute element by element, compare, convert or reduce: torch's meaning in `jax.numpy`.

Each function has the arguments of the operator's schema. Results may have another type than torch's where whole numbers
meet fractions: the program converts them to the type that the graph names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from jax.scipy import special

Operator = Callable[..., Any]
"""Arrays and plain values to an array, or to a tuple of them."""
Axes = int | Sequence[int] | None


def dtype_of(dtype: torch.dtype) -> jnp.dtype[Any]:
    """JAX's name of a type of torch's."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def _in(x: Array, dtype: torch.dtype | None) -> Array:
    """The elements in that type, if one is named."""
    return x if dtype is None else x.astype(dtype_of(dtype))


def floating(x: Array) -> Array:
    """Whole numbers become float32, as in torch's functions of real numbers."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _axes(x: Array, dim: Axes) -> int | tuple[int, ...] | None:
    """No dimension in a list means all of them; of a single number, dimension 0 may be named."""
    if dim is None or x.ndim == 0:
        return None
    return dim if isinstance(dim, int) else tuple(dim) or None


def _scaled(combine: Operator) -> Operator:
    return lambda a, b, *, alpha=1: combine(a, b if alpha == 1 else b * alpha)


def _divide(a: Array, b: Array | float, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        return jnp.trunc(jnp.true_divide(a, b))
    return jnp.true_divide(floating(jnp.asarray(a)), b)


def _clamp(x: Array, low: Array | float | None = None, high: Array | float | None = None) -> Array:
    found = x if low is None else jnp.maximum(x, low)
    return found if high is None else jnp.minimum(found, high)


def _gelu(x: Array, *, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    # log1p(exp(x)) overflows for large x also where its result is not taken: its gradient would be NaN
    small = jnp.where(x * beta > threshold, 0, x)
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(small * beta)) / beta)


def _hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    return jnp.clip(x, min_val, max_val)


def _to(x: Array, *arguments: object, **_: object) -> Array:
    """Whatever the overload: a device is this one, a memory format is none of JAX's."""
    dtypes = [a for a in (*arguments, _.get("dtype")) if isinstance(a, torch.dtype)]
    return x.astype(dtype_of(dtypes[0])) if dtypes else x


def _softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    return jax.nn.softmax(_in(x, dtype), axis=dim)


def _log_softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    return jax.nn.log_softmax(_in(x, dtype), axis=dim)


def _sum(x: Array, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.sum(_in(x, dtype), axis=_axes(x, dim), keepdims=keepdim)


def _mean(x: Array, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.mean(_in(x, dtype), axis=_axes(x, dim), keepdims=keepdim)


def _spread(measure: Operator) -> Operator:
    """Both overloads: `(x, unbiased)`, `(x, dim, unbiased, keepdim)` and `(x, dim, *, correction, keepdim)`."""

    def spread(
        x: Array,
        dim: Axes | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Array:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        ddof = (1 if unbiased else 0) if correction is None else correction
        return measure(x, axis=_axes(x, dim), ddof=ddof, keepdims=keepdim)

    return spread


def _and_mean(measure: Operator) -> Operator:
    spread = _spread(measure)

    def both(x: Array, dim: Axes | bool = None, unbiased: bool = True, keepdim: bool = False, **how: Any) -> Any:
        kept = how.get("keepdim", keepdim)
        mean = jnp.mean(x, axis=None if isinstance(dim, bool) else _axes(x, dim), keepdims=kept)
        return spread(x, dim, unbiased, **({"keepdim": keepdim} | how)), mean

    return both


def _extreme(value: Operator, place: Operator, pairwise: Operator) -> Operator:
    """`(values, indices)` along a dimension; without one the value alone, and of two arrays the elements' values."""

    def extreme(x: Array, dim: int | Array | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return value(x)
        if not isinstance(dim, int):
            return pairwise(x, dim)
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        where = place(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, where, axis=dim)
        return (found, where) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(where, dim))

    return extreme


def _place(place: Operator) -> Operator:
    return lambda x, dim=None, keepdim=False: place(x, axis=_axes(x, dim), keepdims=keepdim)


def _along(reduce: Operator) -> Operator:
    return lambda x, dim=None, keepdim=False: reduce(x, axis=_axes(x, dim), keepdims=keepdim)


def _norm(x: Array, p: float | None = 2, dim: Axes = None, keepdim: bool = False, *, dtype: object = None) -> Array:
    return jnp.sum(jnp.abs(x) ** (2 if p is None else p), axis=_axes(x, dim), keepdims=keepdim) ** (1 / (p or 2))


def _cumsum(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.cumsum(_in(x, dtype), axis=dim) if x.ndim else x


def _lerp(a: Array, b: Array, weight: Array | float) -> Array:
    return a + weight * (b - a)


def _addcmul(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + value * a * b


def _addcdiv(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + value * a / b


_OF_REALS: Mapping[str, Operator] = {
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "reciprocal": jnp.reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "atan": jnp.arctan,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "erf": special.erf,
    "log_sigmoid": jax.nn.log_sigmoid,
}

ELEMENTWISE: Mapping[str, Operator] = {
    **{name: (lambda x, f=f: f(floating(x))) for name, f in _OF_REALS.items()},
    "add": _scaled(jnp.add),
    "sub": _scaled(jnp.subtract),
    "rsub": _scaled(lambda a, b: b - a),
    "mul": jnp.multiply,
    "div": _divide,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "square": jnp.square,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "pow": jnp.power,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "clamp": _clamp,
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": _gelu,
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "elu": lambda x, alpha=1.0: jax.nn.elu(x, alpha),
    "selu": jax.nn.selu,
    "leaky_relu": lambda x, negative_slope=0.01: jax.nn.leaky_relu(x, negative_slope),
    "hardtanh": _hardtanh,
    "hardsigmoid": jax.nn.hard_sigmoid,
    "hardswish": jax.nn.hard_swish,
    "softplus": _softplus,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_not": jnp.logical_not,
    "logical_xor": jnp.logical_xor,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_not": jnp.bitwise_not,
    "isfinite": jnp.isfinite,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "where": jnp.where,
    "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "to": _to,
    "type_as": lambda x, other: x.astype(other.dtype),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "sum": _sum,
    "mean": _mean,
    "var": _spread(jnp.var),
    "std": _spread(jnp.std),
    "var_mean": _and_mean(jnp.var),
    "std_mean": _and_mean(jnp.std),
    "amax": _along(jnp.max),
    "amin": _along(jnp.min),
    "max": _extreme(jnp.max, jnp.argmax, jnp.maximum),
    "min": _extreme(jnp.min, jnp.argmin, jnp.minimum),
    "argmax": _place(jnp.argmax),
    "argmin": _place(jnp.argmin),
    "any": _along(jnp.any),
    "all": _along(jnp.all),
    "prod": lambda x, dim=None, keepdim=False, *, dtype=None: jnp.prod(
        _in(x, dtype), axis=_axes(x, dim), keepdims=keepdim
    ),
    "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False, *, dtype=None: _norm(x, ord, dim, keepdim),
    "logsumexp": lambda x, dim, keepdim=False: special.logsumexp(x, axis=_axes(x, dim), keepdims=keepdim),
    "cumsum": _cumsum,
}
"""By the operator's name without its overload."""
