"""Operators that compute element by element, compare or convert: torch's meaning in `jax.numpy`.

Each function has the arguments of the operator's schema. Results may have another type than torch's: the program
converts them to the type that the graph names. Formulas, of derivatives too, are those of torch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from jax.scipy import special

from isthmus.training.jax.arrays import (
    Number,
    Operator,
    common_type,
    dtype_of,
    expect,
    floating,
    is_real,
    of_one,
    of_several,
    paired,
    together,
    wide,
    widened,
)

LOG_2 = math.log(2)


def _real(value: Operator, backward: Operator, keeps: str = "x") -> Operator:
    """Make a function of real numbers, which converts whole ones."""
    of = of_one(value, backward, keeps)
    return lambda x: of(floating(x))


def _whole_stays(f: Operator) -> Operator:
    """Rounds to a whole number, which has no gradient."""
    return lambda x: lax.stop_gradient(f(x)) if is_real(x) else x


def _scaled(combine: Operator) -> Operator:
    def scaled(a: Array | Number, b: Array | Number, alpha: Number = 1) -> Array:
        x, y = together(a, b)
        return combine(x, y if alpha == 1 else y * jnp.asarray(alpha, y.dtype))

    return scaled


_quotient = of_several(lambda a, b: a / b, lambda g, a, b: (g / b, -g * ((a / b) / b)))


def _floored(a: Array, b: Array) -> Array:
    """Return the remainder as Python does: it has the sign of b."""
    if not is_real(a):
        return jnp.floor_divide(a, jnp.where(b == 0, 1, b))
    rest = lax.rem(a, b)
    found = (a - rest) / b
    found = jnp.where((rest != 0) & ((b < 0) != (rest < 0)), found - 1, found)
    whole = jnp.floor(found)
    whole = jnp.where(found - whole > 0.5, whole + 1, whole)
    zero = jnp.copysign(jnp.zeros_like(a), a / b)
    return jnp.where(b == 0, a / b, jnp.where(found != 0, whole, zero))


def _divide(a: Array | Number, b: Array | Number, *, rounding_mode: str | None = None) -> Array:
    x, y = together(a, b)
    if rounding_mode is None:
        return _quotient(floating(x), floating(y))
    if not is_real(x):
        expect(y != 0)
    if rounding_mode == "floor":
        return lax.stop_gradient(_floored(x, y))
    return lax.stop_gradient(jnp.trunc(x / y) if is_real(x) else lax.div(x, jnp.where(y == 0, 1, y)))


def _rest(a: Array, b: Array) -> Array:
    if not is_real(a):
        return jnp.remainder(a, jnp.where(b == 0, 1, b))
    rest = lax.rem(a, b)
    return jnp.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


_remains = of_several(_rest, lambda g, a, b: (g, -g * _floored(a, b)))


def _remainder(a: Array | Number, b: Array | Number) -> Array:
    x, y = together(a, b, exact=False)
    if not is_real(x):
        expect(y != 0)
    return _remains(x, y)


def _power_of(a: Array, b: Array) -> Array:
    """C's: also 0, or an infinity, to the 0 is 1."""
    return jnp.power(a, b)


def _power_gradients(g: Array, a: Array, b: Array) -> tuple[Array, Array]:
    of_base = jnp.where(b == 0, 0, g * (b * _power_of(a, b - 1)))
    of_exponent = g * jnp.where((a == 0) & (b >= 0), 0, _power_of(a, b) * jnp.log(a))
    return of_base, of_exponent


_real_power = of_several(_power_of, _power_gradients)


def _power(a: Array | Number, b: Array | Number) -> Array:
    x, y = together(a, b)
    if is_real(x):
        return _fixed_power(x, float(b)) if not isinstance(b, Array) else _real_power(x, y)
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        return jnp.power(x, y)
    found = jnp.power(x, jnp.maximum(y, 0))
    return jnp.where(y >= 0, found, jnp.where(x == 1, 1, jnp.where(x == -1, jnp.where(y % 2 == 0, 1, -1), 0)))


_ROOTS: Mapping[float, Operator] = {0.5: jnp.sqrt, -0.5: lax.rsqrt, -1: lambda x: 1 / x, -2: lambda x: 1 / (x * x)}
"""Powers that torch computes so: of -inf they differ from C's."""


def _fixed_power(x: Array, exponent: float) -> Array:
    def power(x: Array, exponent: float) -> Array:
        if exponent in (1, 2, 3):
            return (x, x * x, x * x * x)[int(exponent) - 1]
        return _ROOTS[exponent](x) if exponent in _ROOTS else _power_of(x, jnp.asarray(exponent, x.dtype))

    def gradient(g: Array, x: Array, y: Any) -> Array:
        return jnp.zeros_like(g) if exponent == 0 else g * (exponent * power(x, exponent - 1))

    return of_one(lambda x: jnp.ones_like(x) if exponent == 0 else power(x, exponent), gradient)(x)


_lerped = of_several(
    lambda a, b, w: jnp.where(jnp.abs(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w)),
    lambda g, a, b, w: (g * (1 - w), g * w, g * (b - a)),
)


def _addcmul(x: Array, a: Array, b: Array, *, value: Number = 1) -> Array:
    return of_several(lambda x, a, b: x + value * a * b, lambda g, x, a, b: (g, g * (b * value), g * (a * value)))(
        *together(x, a, b)
    )


def _addcdiv(x: Array, a: Array, b: Array, *, value: Number = 1) -> Array:
    return of_several(
        lambda x, a, b: x + value * a / b, lambda g, x, a, b: (g, g * (value / b), -g * (a * value) / (b * b))
    )(*together(x, a, b))


def _only(condition: Array, g: Array) -> Array:
    return jnp.where(condition, g, 0)


_larger = of_several(
    jnp.maximum, lambda g, a, b: (_only(~(a < b), _halved(g, a, b)), _only(~(a > b), _halved(g, a, b)))
)
_smaller = of_several(
    jnp.minimum, lambda g, a, b: (_only(~(a > b), _halved(g, a, b)), _only(~(a < b), _halved(g, a, b)))
)


def _halved(g: Array, a: Array, b: Array) -> Array:
    return jnp.where(a == b, g / 2, g)


_at_least = of_several(jnp.maximum, lambda g, x, low: (_only(x >= low, g), _only(x < low, g)))
_at_most = of_several(jnp.minimum, lambda g, x, high: (_only(x <= high, g), _only(x > high, g)))
_between = of_several(
    lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    lambda g, x, low, high: (
        _only((x >= low) & (x <= high), g),
        _only((low < high) & (x < low), g),
        _only((high < low) | (x > high), g),
    ),
)


def _clamp(x: Array, min: Array | Number | None = None, max: Array | Number | None = None) -> Array:
    if max is None:
        return x if min is None else _at_least(*together(x, min, exact=False))
    return _at_most(*together(x, max, exact=False)) if min is None else _between(*together(x, min, max, exact=False))


def _gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715

        def slope(g: Array, x: Array, _: Any) -> Array:
            inner = jnp.tanh(beta * (x + kappa * x * x * x))
            left, right = 0.5 * x, 1 + inner
            of_inner = (1 - inner * inner) * beta * (1 + 3 * kappa * x * x)
            return g * (0.5 * right + left * of_inner)

        return of_one(lambda x: 0.5 * x * (1 + jnp.tanh(beta * (x + kappa * x * x * x))), slope)(x)
    root = math.sqrt(0.5)

    def density(g: Array, x: Array, _: Any) -> Array:
        below = 0.5 * (1 + special.erf(x * root))
        return g * (below + x * (jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)))

    return of_one(lambda x: x * 0.5 * (1 + special.erf(x * root)), density)(x)


def _softplus(x: Array, beta: Number = 1, threshold: Number = 20) -> Array:
    def backward(g: Array, x: Array, _: Any) -> Array:
        z = jnp.exp(x * beta)
        return jnp.where(x * beta > threshold, g, g * z / (z + 1))

    return of_one(lambda x: jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta), backward)(x)


def _elu(x: Array, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Array:
    low = alpha * scale
    return of_one(
        lambda x: jnp.where(x <= 0, jnp.expm1(x * input_scale) * low, x * scale),
        lambda g, x, _: jnp.where(x <= 0, g * input_scale * low * jnp.exp(x * input_scale), g * scale),
    )(x)


def _selu(x: Array) -> Array:
    return _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _leaky_relu(x: Array, negative_slope: Number = 0.01) -> Array:
    return of_one(
        lambda x: jnp.where(x > 0, x, x * negative_slope), lambda g, x, _: jnp.where(x > 0, g, g * negative_slope)
    )(x)


def _hardtanh(x: Array, min_val: Number = -1, max_val: Number = 1) -> Array:
    return of_one(
        lambda x: jnp.clip(x, min_val, max_val), lambda g, x, _: jnp.where((x <= min_val) | (x >= max_val), 0, g)
    )(x)


def _sixth(x: Array) -> Array:
    return jnp.minimum(jnp.maximum(x + 3, 0), 6)


def _log_sigmoid_gradient(g: Array, x: Array, _: Any) -> Array:
    z = jnp.exp(-jnp.abs(x))
    return g * (jnp.where(x < 0, 1, 0) - jnp.where(x < 0, 1, -1) * (z / (1 + z)))


def _mish(x: Array) -> Array:
    """x tanh(log(1 + e^x)), by n / (n + 2) with n = e^x (e^x + 2)."""

    def parts(x: Array) -> tuple[Array, Array]:
        """The hyperbolic tangent, and 1 less its square."""
        z = jnp.exp(jnp.minimum(x, 20))
        n = z * (z + 2)
        return n / (n + 2), jnp.where(x > 20, 0, 4 * (n + 1) / ((n + 2) * (n + 2)))

    def backward(g: Array, x: Array, _: Any) -> Array:
        inner, rest = parts(x)
        return g * (inner + x * jax.nn.sigmoid(x) * rest)

    return of_one(lambda x: x * parts(x)[0], backward)(x)


def _silu_gradient(g: Array, x: Array, _: Any) -> Array:
    y = jax.nn.sigmoid(x)
    return g * y * (1 + x * (1 - y))


def _rounded(x: Array, *, decimals: int = 0) -> Array:
    if not is_real(x) or decimals == 0:
        return _whole_stays(jnp.round)(x)
    factor = float(10 ** abs(decimals))
    return lax.stop_gradient(jnp.round(x * factor) / factor if decimals > 0 else jnp.round(x / factor) * factor)


def _to(x: Array, *arguments: object, **_: object) -> Array:
    """Whatever the overload: a device is this one, a memory format is none of JAX's."""
    if arguments and isinstance(arguments[0], Array):
        return x.astype(arguments[0].dtype)
    dtypes = [a for a in (*arguments, _.get("dtype")) if isinstance(a, torch.dtype)]
    return x.astype(dtype_of(dtypes[0])) if dtypes else x


def _where(condition: Array, a: Array | Number, b: Array | Number) -> Array:
    dtype = dtype_of(common_type(a, b))
    return jnp.where(condition.astype(bool), wide(jnp.asarray(a, dtype)), wide(jnp.asarray(b, dtype)))


def _masked_fill(x: Array, mask: Array, value: Array | Number) -> Array:
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


def _sign(x: Array) -> Array:
    """Return the sign, and 0 for nan."""
    return (jnp.greater(x, 0).astype(x.dtype) - jnp.less(x, 0).astype(x.dtype)) if x.dtype != bool else x


ELEMENTWISE: Mapping[str, Operator] = {
    "exp": _real(jnp.exp, lambda g, x, y: g * y, "y"),
    "expm1": _real(jnp.expm1, lambda g, x, y: g * (y + 1), "y"),
    "log": _real(jnp.log, lambda g, x, y: g / x),
    "log1p": _real(jnp.log1p, lambda g, x, y: g / (x + 1)),
    "log2": _real(jnp.log2, lambda g, x, y: g / (x * LOG_2)),
    "sqrt": _real(jnp.sqrt, lambda g, x, y: g / (2 * y), "y"),
    "rsqrt": _real(lax.rsqrt, lambda g, x, y: -0.5 * g * (lax.rsqrt(x) / jnp.abs(x))),
    "reciprocal": _real(lambda x: 1 / x, lambda g, x, y: -g * (y * y), "y"),
    "sin": _real(jnp.sin, lambda g, x, y: g * jnp.cos(x)),
    "cos": _real(jnp.cos, lambda g, x, y: g * -jnp.sin(x)),
    "tan": _real(jnp.tan, lambda g, x, y: g * (1 + y * y), "y"),
    "atan": _real(jnp.arctan, lambda g, x, y: g / (x * x + 1)),
    "tanh": _real(jnp.tanh, lambda g, x, y: g * (1 - y * y), "y"),
    "sigmoid": _real(jax.nn.sigmoid, lambda g, x, y: g * (1 - y) * y, "y"),
    "erf": _real(special.erf, lambda g, x, y: 2 / math.sqrt(math.pi) * jnp.exp(-(x * x)) * g),
    "log_sigmoid": of_one(lambda x: jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x))), _log_sigmoid_gradient),
    "add": _scaled(jnp.add),
    "sub": _scaled(jnp.subtract),
    "rsub": lambda a, b, alpha=1: _scaled(jnp.subtract)(b, a, alpha),
    "mul": paired(jnp.multiply),
    "div": _divide,
    "floor_divide": lambda a, b: _divide(a, b, rounding_mode="floor"),
    "remainder": _remainder,
    "neg": jnp.negative,
    "abs": of_one(jnp.abs, lambda g, x, y: g * _sign(x)),
    "sign": lambda x: lax.stop_gradient(_sign(x)),
    "square": of_one(lambda x: x * x, lambda g, x, y: g * (2 * x)),
    "floor": _whole_stays(jnp.floor),
    "ceil": _whole_stays(jnp.ceil),
    "round": widened(_rounded),
    "pow": _power,
    "lerp": lambda a, b, weight: _lerped(*together(a, b, weight)),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "maximum": paired(_larger, exact=False),
    "minimum": paired(_smaller, exact=False),
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "relu": of_one(lambda x: jnp.maximum(x, 0), lambda g, x, y: jnp.where(y <= 0, 0, g), "y"),
    "relu6": lambda x: _hardtanh(x, 0, 6),
    "gelu": _gelu,
    "silu": of_one(lambda x: x / (1 + jnp.exp(-x)), _silu_gradient),
    "mish": _mish,
    "elu": _elu,
    "selu": _selu,
    "leaky_relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "hardsigmoid": of_one(lambda x: _sixth(x) / 6, lambda g, x, y: jnp.where((x > -3) & (x < 3), g * (1 / 6), 0)),
    "hardswish": of_one(
        lambda x: x * _sixth(x) / 6,
        lambda g, x, y: jnp.where(x <= -3, 0, jnp.where(x < 3, g * (x / 3 + 0.5), g)),
    ),
    "softplus": _softplus,
    "eq": paired(jnp.equal, exact=False),
    "ne": paired(jnp.not_equal, exact=False),
    "lt": paired(jnp.less, exact=False),
    "le": paired(jnp.less_equal, exact=False),
    "gt": paired(jnp.greater, exact=False),
    "ge": paired(jnp.greater_equal, exact=False),
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_not": jnp.logical_not,
    "logical_xor": jnp.logical_xor,
    "__and__": paired(jnp.bitwise_and),
    "__or__": paired(jnp.bitwise_or),
    "bitwise_and": paired(jnp.bitwise_and),
    "bitwise_or": paired(jnp.bitwise_or),
    "bitwise_not": jnp.bitwise_not,
    "isfinite": jnp.isfinite,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "where": _where,
    "masked_fill": _masked_fill,
    "to": _to,
    "type_as": lambda x, other: x.astype(other.dtype),
}
